"""A version breaks its guard's limits; guards without meaning are refused."""

import pytest

from lora_jax.adapters.rollout_guard import Guard, Outcome, Outcomes, broken, guard_of


def seen(outcomes) -> Outcomes:
    total = Outcomes()
    for one in outcomes:
        total = total.plus(one)
    return total


def test_sums():
    total = seen([Outcome(failed=True), Outcome(at_length=True, ttft_s=2.0, logprob_sum=-3.0)])
    assert total == Outcomes(2, 1, 1, 2.0, 1, -3.0, 0)


def test_a_rate_is_judged_when_enough_has_ended_or_nothing_can_save_it():
    guard = Guard(min_requests=100, error_rate=0.02)
    good, bad = Outcome(), Outcome(failed=True)
    assert broken(guard, seen([bad, bad])) is None  # 2 of 100 keep the limit
    assert "error_rate 1 is over 0.02 after 3" in broken(guard, seen([bad] * 3))
    assert broken(guard, seen([bad] * 2 + [good] * 98)) is None
    assert broken(guard, seen([bad] * 3 + [good] * 147)) is None
    assert broken(guard, seen([bad] * 4 + [good] * 146))
    assert broken(Guard(min_requests=1, error_rate=0.0), seen([good])) is None
    assert broken(Guard(min_requests=10, error_rate=0.0), seen([bad]))


@pytest.mark.parametrize(
    ("guard", "one"),
    [
        (Guard(5, length_rate=0.5), Outcome(at_length=True)),
        (Guard(5, ttft_s=0.1), Outcome(ttft_s=0.2)),
        (Guard(5, mean_logprob=-1.0), Outcome(logprob_sum=-30.0, num_logprobs=10)),
    ],
    ids=["length", "ttft", "logprob"],
)
def test_other_limits(guard, one):
    assert broken(guard, seen([one] * 5))
    assert broken(guard, seen([Outcome()] * 5)) is None
    assert broken(guard, Outcomes()) is None


def test_what_comes_as_json_goes_out_as_json():
    said = {"min_requests": 200, "error_rate": 0.02}
    assert guard_of(said) == Guard(200, error_rate=0.02)
    assert guard_of(said).as_json() == said


WRONG = [
    ([], "object"),
    ({}, "limit"),
    ({"min_requests": 5}, "limit"),
    ({"error_rat": 0.1}, "'error_rat'"),
    ({"error_rate": "0.1"}, "error_rate"),
    ({"error_rate": True}, "error_rate"),
    ({"error_rate": float("nan")}, "error_rate"),
    ({"error_rate": 1.5}, r"\[0, 1\]"),
    ({"error_rate": -0.1}, r"\[0, 1\]"),
    ({"error_rate": 0.1, "min_requests": 0}, "min_requests"),
    ({"error_rate": 0.1, "min_requests": 1.5}, "min_requests"),
    ({"mean_logprob": 1.0}, "mean_logprob"),
]


@pytest.mark.parametrize(("said", "named"), WRONG, ids=range(len(WRONG)))
def test_wrong_guards_name_the_field(said, named):
    with pytest.raises(ValueError, match=named):
        guard_of(said)
