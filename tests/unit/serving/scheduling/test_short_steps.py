"""Tenants for whom a step is short, those whose rows sit out, and who is charged."""

import pytest

from serving.api.request import Request, Sequence, Share
from serving.api.sampling import Sampling
from serving.scheduling.fair_share import FairShares
from serving.scheduling.short_steps import ShortStep, short_step

ROWS = 32


def case(
    held: dict[str, int], waiting: dict[str, float], times: dict[str, int] | None = None
) -> tuple[FairShares, list[Sequence]]:
    """`held` rows decode, `waiting` tenants have a weight; both after `times` tokens."""
    fair, running = FairShares(), []
    for tenant, count in held.items():
        share = Share(tenant, waiting.get(tenant, 1.0))
        fair.enter(share, count, begins=True)
        request = Request(
            tenant, (1,), Sampling(), None, "", lambda delta: None, 0.0, 0.0, share=share
        )
        running += [Sequence(request, i, 0, [1], max_outputs=9) for i in range(count)]
    for tenant, weight in waiting.items():
        fair.enter(Share(tenant, weight), 1, begins=True)
    for tenant, tokens in (times or {}).items():
        fair.charge(tenant, tokens)
    for sequence in running:
        sequence.num_computed = sequence.num_scheduled_outputs = 1
    return fair, running


def due(held: dict, waiting: dict, times: dict | None = None) -> ShortStep:
    fair, running = case(held, waiting, times)
    return short_step(fair, running, waiting, ROWS)


def test_a_crowd_sits_out_for_whoever_holds_little():
    step = due({"flood": 32}, {"caller": 1.0, "flood": 1.0}, {"flood": 50})
    assert step == ShortStep(frozenset({"caller"}), frozenset({"flood"}))
    both = due({"flood": 31, "other": 1}, {"caller": 1.0}, {"flood": 50})
    assert both == ShortStep(frozenset({"caller"}), frozenset({"flood"}))


@pytest.mark.parametrize(
    ("held", "waiting", "times"),
    [
        ({"flood": 32}, {"flood": 1.0}, {}),  # nobody else
        ({"flood": 16}, {"caller": 1.0}, {"flood": 50}),  # within its share
        ({"flood": 27, "caller": 5}, {"caller": 1.0}, {"flood": 50}),  # no little any more
        ({"flood": 32}, {"caller": 1.0}, {"flood": 50, "caller": 51}),  # had its turn
        ({f"t{i}": 1 for i in range(32)}, {"caller": 1.0}, {}),  # many, but no crowd
    ],
)
def test_other_steps_are_as_always(held, waiting, times):
    assert due(held, waiting, times) == ShortStep()


def test_a_prompt_that_runs_already_has_short_steps_too():
    fair, running = case({"flood": 31, "caller": 1}, {}, {"flood": 50})
    assert short_step(fair, running, [], ROWS) == ShortStep()
    running[-1].num_scheduled_outputs, running[-1].token_ids = 4, [1] * 5
    assert short_step(fair, running, [], ROWS).callers == {"caller"}


def test_a_crowd_comes_last_in_the_order_of_decoding():
    _, running = case({"flood": 3, "caller": 2}, {})
    step = ShortStep(frozenset({"caller"}), frozenset({"flood"}))
    assert step.order(running) == [*running[3:], *running[:3]]
    assert ShortStep().order(running) == running


def test_rows_that_sat_out_are_charged_to_those_served():
    fair, _ = case({"flood": 30}, {"a": 1.0, "b": 2.0, "c": 1.0})
    step = ShortStep(frozenset("abc"), frozenset({"flood"}))
    step.charge(fair, frozenset({"a", "b", "flood"}), 30)
    fair.charge("c", 7)
    assert fair.ordered(["a", "b", "c"]) == ["c", "b", "a"]
    assert not fair.comes_before("a", "b")
    step.charge(fair, frozenset(), 30)
