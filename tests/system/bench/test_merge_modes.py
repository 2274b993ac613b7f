"""The comparison of policies of merged weights: medians of turns, ours beside the better other."""

import pytest

from bench.merge_modes import (
    OTHERS,
    TOP,
    Contestant,
    Seconds,
    chosen,
    compared,
    names_of,
    ratio,
)
from serving.scheduling.merge_policy import PLAIN, MergePolicy, MergeTarget


def contestant(*rates: float, **steps: int) -> Contestant:
    """A policy with turns of 1,000 tokens; the clock takes twice the processor time."""
    one = Contestant(policy=None, turns=[Seconds(1000 / rate, 2000 / rate) for rate in rates])
    one.steps.update(steps)
    return one


def test_ours_is_compared_turn_by_turn_with_the_better_other():
    """A slow second turn of the machine changes nothing."""
    policies = {
        "unmerged": contestant(100.0, 50.0, 100.0),
        "unmerged again": contestant(101.0, 50.5, 102.0),
        "merged": contestant(90.0, 45.0, 90.0),
        "auto": contestant(99.0, 50.0, 98.0, plain=7),
    }
    found = compared(policies, 1000)
    assert (found["turns"], found["steps"]["auto"]) == (3, {"plain": 7})
    for kind, auto in (("processor", 98.0), ("clock", 49.0)):
        row = found[kind]
        assert (row["better"], row["auto"]) == ("unmerged", auto)
        ours = row["auto_over_better"]
        assert (ours["median"], ours["least"], ours["most"]) == (0.99, 0.98, 1.0)
        assert row["equal_pair"]["median"] == 1.01


def test_the_interval_of_a_ratio_holds_its_median_and_shrinks_with_turns():
    """One turn in two is 10% faster: few turns say little, many say half of it."""
    few, many = ratio([1.0, 1.1], [1.0, 1.0]), ratio([1.0, 1.05, 1.1] * 40, [1.0] * 120)
    assert few["interval"] == [1.0, 1.1]
    assert many["interval"] == [1.05, 1.05]
    assert (few["median"], few["least"], few["most"]) == (1.05, 1.0, 1.1)


@pytest.mark.parametrize(("skew", "adapter"), [(0.5, PLAIN), (0.7, "a0"), (0.95, "a0")])
def test_our_policy_has_chosen_before_the_first_turn(skew: float, adapter: str):
    policy, digests = MergePolicy(mixture=True), {name: name for name in (TOP, *OTHERS)}
    assert chosen(policy, skew, digests).adapter == adapter


def test_a_contestant_begins_with_plain_weights():
    assert contestant().target == MergeTarget(PLAIN)


@pytest.mark.parametrize("skew", [0.5, 0.95])
def test_names_have_the_share_of_the_top_adapter(skew: float):
    names = names_of(skew, 2000)
    assert names.count("a0") / 2000 == pytest.approx(skew, abs=0.04)
    assert names_of(skew, 2000) == names
