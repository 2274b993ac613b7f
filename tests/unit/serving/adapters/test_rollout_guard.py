"""A version breaks its guard's limits; guards without meaning are refused."""

import pytest

from serving.adapters.rollout_guard import Guard, Outcome, Outcomes, broken, guard_of


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


def test_means_are_over_what_was_measured_and_may_be_the_limit():
    guard = Guard(4, ttft_s=0.5, mean_logprob=-2.0)
    told = Outcome(ttft_s=0.5, logprob_sum=-6.0, num_logprobs=3)  # both at their limits
    kept = [told] * 2 + [Outcome()] * 2
    assert broken(guard, seen(kept)) is None
    slow, unlikely = Outcome(ttft_s=0.6), Outcome(logprob_sum=-7.0, num_logprobs=3)
    assert broken(guard, seen([*kept, slow])) == "ttft_s 0.5333 is over 0.5 after 5 requests"
    assert "mean_logprob -2.111 is under -2 after 5" in str(broken(guard, seen([*kept, unlikely])))


def test_limits_may_be_the_ends_of_their_ranges():
    assert guard_of({"error_rate": 0}).min_requests == 20
    said = {"error_rate": 1, "length_rate": 0, "ttft_s": 1e6, "mean_logprob": -1000}
    assert guard_of({**said, "min_requests": 1}).min_requests == 1
    assert guard_of({**said, "min_requests": 10**9, "mean_logprob": 0, "ttft_s": 0})
    wrong = {"min_requests": 10**9 + 1, "ttft_s": 1e6 + 1, "mean_logprob": -1001, "length_rate": 2}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            guard_of({**said, name: value})
    with pytest.raises(ValueError, match=r"needs a limit: one of error_rate, length_rate, ttft_s"):
        guard_of({})


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
