"""The comparison of policies of merged weights: medians of turns, ours beside the better other."""

import pytest

from bench.merge_modes import Contestant, compared, names_of
from serving.scheduling.merge_policy import PLAIN, MergeTarget


def contestant(*rates: float, **steps: int) -> Contestant:
    one = Contestant(policy=None, rates=list(rates))
    one.steps.update(steps)
    return one


def test_ours_is_compared_turn_by_turn_with_the_better_other():
    """A slow second turn of the machine changes nothing."""
    policies = {
        "unmerged": contestant(100.0, 50.0, 100.0),
        "merged": contestant(90.0, 45.0, 90.0),
        "auto": contestant(99.0, 50.0, 98.0, plain=7),
    }
    found = compared(policies)
    assert (found["better"], found["over_better"]) == ("unmerged", 0.99)
    assert (found["least"], found["most"], found["steps"]) == (0.98, 1.0, {"plain": 7})
    assert found["auto"] == 98.0


def test_a_contestant_begins_with_plain_weights():
    assert contestant().target == MergeTarget(PLAIN)


@pytest.mark.parametrize("skew", [0.5, 0.95])
def test_names_have_the_share_of_the_top_adapter(skew: float):
    names = names_of(skew, 2000)
    assert names.count("a0") / 2000 == pytest.approx(skew, abs=0.04)
    assert names_of(skew, 2000) == names
