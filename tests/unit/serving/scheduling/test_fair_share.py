"""Virtual time: who comes next, nobody saves up, and whoever claims cannot be claimed from."""

import collections

from hypothesis import given
from hypothesis import strategies as st

from serving.api.request import Share
from serving.scheduling.fair_share import FairShares, Use, may_claim, victim

weights = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6)


@given(weights, st.lists(st.integers(1, 64), min_size=300, max_size=300))
def test_backlogged_tenants_get_their_share_within_one_piece(given_weights, sizes):
    """Start-time fair queueing's bound: two tenants' virtual times differ by one piece each."""
    fair, tokens = FairShares(), collections.Counter()
    shares = {str(i): Share(str(i), weight) for i, weight in enumerate(given_weights)}
    for share in shares.values():
        fair.enter(share, 1, begins=True)
    for size in sizes:
        name = fair.first(shares)
        fair.charge(name, size)
        tokens[name] += size
        times = {n: tokens[n] / share.weight for n, share in shares.items()}
        for one, share in shares.items():
            for other, theirs in shares.items():
                assert times[one] - times[other] <= 64 / share.weight + 64 / theirs.weight


def test_who_asked_for_nothing_has_saved_up_nothing():
    fair = FairShares()
    fair.enter(Share("busy"), 5, begins=True)
    fair.enter(Share("idle"), 1, begins=True)
    for _ in range(100):
        fair.first(["busy"])
        fair.charge("busy", 10)
    fair.enter(Share("idle"), 1, begins=True)
    turns = []
    for _ in range(10):
        turns.append(fair.first(["busy", "idle"]))
        fair.charge(turns[-1], 10)
    assert 4 <= turns.count("idle") <= 6
    fair.charge("busy", 1000)
    fair.settle()
    fair.enter(Share("late"), 1, begins=True)
    fair.charge("late", 1)
    assert fair.comes_before("busy", "late")


def test_an_idle_engine_keeps_nothing():
    fair = FairShares()
    fair.enter(Share("a"), 2, begins=True)
    fair.charge("a", 100)
    fair.leave("a")
    assert not fair.are_shared
    fair.leave("a")
    fair.check_integrity({}, {})
    fair.enter(Share("a"), 1, begins=True)
    fair.enter(Share("b"), 1, begins=True)
    assert fair.are_shared
    assert fair.comes_before("a", "b")
    assert fair.share_of(Share("c", weight=2.0), 100) == 50


uses = st.dictionaries(
    st.sampled_from("abcde"), st.tuples(st.integers(0, 40), st.floats(0.5, 20)), min_size=2
)


@given(uses, st.integers(1, 10))
def test_no_two_tenants_can_claim_from_each_other(held, more):
    table = {name: Use(float(count), share) for name, (count, share) in held.items()}
    counts = {name: count for name, (count, _) in held.items()}
    for name, use in table.items():
        found = victim(table, name, counts)
        if found is None or not may_claim(use, more) or not use.held:
            continue
        after = dict(table)
        after[name] = Use(use.held + more, use.share)
        after[found] = Use(table[found].held - 1, table[found].share)
        assert table[found].held > table[found].share
        assert after[name].held <= after[name].share
        assert victim({name: after[name]}, found, {name: 99}) is None
