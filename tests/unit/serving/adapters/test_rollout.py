"""Shares move users forward only, and back in one step."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.adapters.rollout import (
    BUCKETS,
    NoWayBack,
    Rollout,
    bucket_of,
    rolled_back,
    rolled_out,
    rollout_of,
    version_at,
)

KNOWN = ("v1", "v2", "v3")


def out(old=None, known=KNOWN, **shares) -> Rollout:
    return rolled_out(old, shares, known=known)


def back(old, known=KNOWN) -> Rollout:
    return rolled_back(old, known=known)


STEP = 25  # every so many buckets are looked at


def owners(state: Rollout) -> list[str]:
    return [version_at(state.now, bucket) for bucket in range(0, BUCKETS, STEP)]


def shares(state: Rollout) -> dict[str, float]:
    return {v: n / 100 for v, n in state.now.buckets.items() if n}


def test_5_50_100_moves_no_user_backwards_and_a_rollback_returns_all():
    first = out(v1=95, v2=5)
    states = [first, half := out(first, v1=50, v2=50), whole := out(half, v2=100)]
    before = ["v1"] * (BUCKETS // STEP)
    for state in states:
        now = owners(state)
        assert all(b == a or a == "v2" for b, a in zip(before, now, strict=True))
        before = now
    assert [STEP * owners(s).count("v2") for s in states] == [500, 5000, 10_000]
    assert [version_at(half.now, bucket) for bucket in (0, 4999, 5000, 9999)] == 2 * ["v2"] + 2 * [
        "v1"
    ]
    with pytest.raises(ValueError, match="bucket"):
        version_at(half.now, BUCKETS)
    for state in states:
        assert shares(back(state)) == {"v1": 100}
    assert whole.revision == 3


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, BUCKETS // STEP), min_size=2, max_size=6))
def test_raised_shares_of_the_newest_move_users_to_it_only(raised):
    state, before = None, ["v1"] * (BUCKETS // STEP)
    for count in (STEP * number for number in sorted(raised)):
        wanted = {"v1": (BUCKETS - count) / 100, "v2": count / 100}
        state = rolled_out(state or out(v1=100), wanted, known=KNOWN)
        now = owners(state)
        assert all(b == a or a == "v2" for b, a in zip(before, now, strict=True))
        assert STEP * now.count("v2") == count
        before = now


def test_the_order_of_versions_is_that_of_their_first_share():
    assert list(out(v2=5, v1=95).now.buckets) == ["v1", "v2"]  # the larger share is the older
    third = out(out(out(v1=100), v1=90, v2=10), v3=100)
    assert list(third.now.buckets) == ["v1", "v2", "v3"]
    assert shares(out(third, v1=60, v3=40)) == {"v1": 60, "v3": 40}
    assert owners(out(third, v1=60, v3=40))[: 4000 // STEP] == ["v3"] * (4000 // STEP)


def test_a_rollback_goes_to_the_last_state_of_older_versions():
    mixed = out(out(out(v1=100), v1=50, v2=50), v1=45, v2=45, v3=10)
    once = back(mixed)
    assert shares(once) == {"v1": 50, "v2": 50}
    twice = back(once)
    assert shares(twice) == {"v1": 100}
    with pytest.raises(NoWayBack, match="'v1'"):
        back(twice)
    done = out(out(out(v1=100), v2=100), v3=100)
    assert shares(back(back(done))) == {"v1": 100}


def test_a_rollback_passes_versions_by_that_are_gone():
    state = out(out(out(v1=100), v2=100), v3=100)
    assert shares(back(state, known=("v1", "v3"))) == {"v1": 100}
    with pytest.raises(NoWayBack):
        back(state, known=("v3",))
    assert shares(back(out(v1=50, v2=30, v3=20))) == {"v1": 50, "v2": 50}


def test_history_is_bounded_and_the_way_back_is_known():
    state = out(v1=95, v2=5)
    for count in range(40):
        state = out(state, v1=95 - count, v2=5 + count)
    assert len(state.history) == 16
    assert state.standby is None
    assert out(state, v2=100).standby == "v1"
    assert back(out(state, v2=100)).standby == "v2"


def test_buckets_are_the_same_in_every_process():
    code = "from serving.adapters.rollout import bucket_of; print(bucket_of('sql', 'user-1'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) == bucket_of("sql", "user-1") == 4854
    assert bucket_of("law", "user-1") != bucket_of("sql", "user-1")
    counts = [bucket_of("sql", f"user-{n}") < 500 for n in range(8000)]
    assert 0.043 < sum(counts) / len(counts) < 0.057


def test_what_goes_out_as_json_comes_back():
    guard = {"error_rate": 0.02, "min_requests": 200}
    state = rolled_out(out(v1=100), {"v1": 99.5, "v2": 0.5}, known=KNOWN, guard=guard, now=5.5)
    assert rollout_of(json.loads(json.dumps(state.as_json()))) == state


WRONG = [
    ({}, "at least one"),
    (["v1"], r"must be a mapping.*not \['v1'\]"),
    ({"v1": 95, "v9": 5}, "'v9'"),
    ({"v1": 95}, "sum to 100, got 95"),
    ({"v1": 95, "v2": 6}, "sum to 100, got 101"),
    ({"v1": 101}, r"\[0, 100\]"),
    ({"v1": 105, "v2": -5}, r"\[0, 100\]"),
    ({"v1": "100"}, "must be a number"),
    ({"v1": True}, "must be a number"),
    ({"v1": None}, "must be a number"),
    ({"v1": float("nan")}, "must be a number"),
    ({"v1": float("inf")}, "must be a number"),
    ({"v1": 99.999, "v2": 0.001}, "two decimals"),
    ({f"v{n}": 1 for n in range(17)}, "at most 16"),
]


@pytest.mark.parametrize(("said", "named"), WRONG, ids=range(len(WRONG)))
def test_wrong_shares_say_what_is_wrong(said, named):
    known = KNOWN if len(said) < 17 else tuple(said)
    with pytest.raises(ValueError, match=named):
        rolled_out(out(v1=100), said, known=known)


def test_of_more_than_16_versions_the_oldest_without_a_share_are_forgotten():
    known = [f"v{n}" for n in range(17)]
    state = rolled_out(None, dict.fromkeys(known[:16], 6.25), known=known)
    assert len(state.now.buckets) == 16
    state = rolled_out(state, {"v16": 100}, known=known)
    assert [*state.now.buckets] == known[1:]
    state = rolled_out(state, {"v0": 50, "v16": 50}, known=known)  # one that is back
    assert [*state.now.buckets] == ["v0", *known[2:]]
    assert state.now.served == ("v0", "v16")
    assert rolled_back(state, known=known).now.served == ("v0",)


@pytest.mark.parametrize("versions", [{"v1": 99}, {"v1": 50, "v2": 60}, {"v1": 50, "a b": 50}])
def test_a_state_whose_shares_cannot_be_is_refused(versions):
    said = out(v1=100).as_json()
    with pytest.raises(ValueError, match="versions"):
        rollout_of({**said, "versions": versions})


@pytest.mark.parametrize("field", ["versions", "guard", "since", "why", "history", "revision"])
def test_states_that_are_none_are_refused(field):
    said = out(v1=100).as_json()
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        rollout_of({**said, field: [["x"]]})
