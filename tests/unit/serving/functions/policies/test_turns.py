"""Turns by deadline margin, against all orders."""

import itertools
import random

import pytest

from serving.functions.policies.turns import Contender, in_turn, margin


def contenders(seed: int, run_s: float | None = None) -> list[Contender]:
    rng = random.Random(seed)
    return [
        Contender(str(i), rng.uniform(0.5, 4), rng.uniform(0, 2), run_s or rng.uniform(0.05, 0.5))
        for i in range(5)
    ]


def lateness(order) -> float:
    """Return the worst seconds past a deadline when the batches run one after the other."""
    ends = itertools.accumulate(c.run_s for c in order)
    return max(end - (c.slo_s - c.waited_s) for c, end in zip(order, ends, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_batches_of_equal_length_are_never_later_than_in_the_best_of_all_orders(seed):
    batches = contenders(seed, run_s=0.3)
    best = min(lateness(order) for order in itertools.permutations(batches))
    assert lateness(in_turn(batches)) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_has_the_least_margin_of_equation_6(seed):
    batches = contenders(seed)
    least = min(c.slo_s - (c.waited_s + 5 * c.run_s) for c in batches)
    assert margin(in_turn(batches)[0], 5) == least


def test_equal_margins_go_to_the_one_that_waits_longest():
    first, second = Contender("a", 1.0, 0.25, 0.25), Contender("b", 1.25, 0.5, 0.25)
    assert [c.name for c in in_turn([first, second])] == ["b", "a"]
    assert in_turn([]) == []
