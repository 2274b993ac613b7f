"""Merged weights in the schedule: sequences keep their arithmetic, steps hold one kind of them."""

import functools
import random

import pytest
from support.drivers.scheduler_driver import Driver, check_answer, limits

from serving.api.request import FinishReason
from serving.scheduling.merge_modes import MergeModes
from serving.scheduling.merge_policy import PLAIN, MergeTarget

ROOMY = limits(num_pages=64, max_num_seqs=6, max_num_batched_tokens=24)


class Fixed:
    """A policy that says what it is told."""

    def __init__(self, adapter: str = PLAIN):
        self.adapter = adapter

    def next(self, target, rows, can_merge):
        return MergeTarget(self.adapter)


class Restless:
    """A policy that changes its mind at random."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def next(self, target, rows, can_merge):
        return (
            MergeTarget(self.rng.choice(["", "a", "b", "e"])) if self.rng.random() < 0.1 else target
        )


def make_driver(policy, *, mixture=True, theta=2.0, bounds=ROOMY, **options) -> Driver:
    make = functools.partial(MergeModes, mixture=mixture, theta=theta)
    driver = Driver(bounds, make_modes=make, **options)
    driver.scheduler.modes.policy = policy
    return driver


def resident(driver, *adapters):
    """Bring adapters onto the device, and let the policy speak once."""
    for adapter in adapters:
        driver.add([1, 2], adapter=adapter, max_tokens=1)
    driver.run()


def kinds(driver, since=0):
    """What each step ran: the merged adapter, and the adapters of its rows."""
    return [
        (
            plan.merged and plan.merged.digest,
            {chunk.sequence.request.adapter_digest for chunk in plan.chunks},
        )
        for plan in driver.plans[since:]
    ]


def test_rows_of_others_run_on_the_merged_weights_in_a_mixture():
    driver = make_driver(Fixed("a"))
    resident(driver, "a", "b")
    begun = len(driver.plans)
    added = [driver.add([1] * 5, adapter=name)[0] for name in ("a", "b", "")]
    driver.run()
    assert {sequence.weights for sequence in added} == {"a"}
    assert ("a", {"a", "b", ""}) in kinds(driver, begun)
    for sequence in added:
        check_answer(driver, sequence)


def test_without_a_mixture_others_keep_the_plain_weights_and_steps_of_their_own():
    driver = make_driver(Fixed("a"), mixture=False)
    resident(driver, "a", "b")
    begun = len(driver.plans)
    added = [driver.add([1] * 5, adapter=name)[0] for name in ("a", "b", "")]
    driver.run()
    assert [sequence.weights for sequence in added] == ["a", PLAIN, PLAIN]
    assert {str(kind) for kind in kinds(driver, begun)} <= {
        str(kind) for kind in [("a", {"a"}), (None, {"b", ""}), (None, {"", "b"}), (None, {"b"})]
    } | {str((None, {""}))}


def test_a_sequence_keeps_its_weights_when_the_choice_changes():
    driver = make_driver(Fixed("a"))
    resident(driver, "a", "b")
    (old,) = driver.add([3] * 4, adapter="a", max_tokens=12, ignore_eos=True)
    driver.step()
    driver.scheduler.modes.policy = Fixed(PLAIN)
    driver.step()
    (new,) = driver.add([4] * 4, adapter="a", max_tokens=12, ignore_eos=True)
    driver.run()
    assert (old.weights, new.weights) == ("a", PLAIN)
    check_answer(driver, old)
    check_answer(driver, new)


def test_another_adapter_is_merged_when_no_sequence_needs_the_first():
    driver = make_driver(Fixed("a"))
    resident(driver, "a", "b")
    (first,) = driver.add([3] * 4, adapter="a", max_tokens=8, ignore_eos=True)
    driver.step()
    driver.scheduler.modes.policy = Fixed("b")
    driver.step()
    (between,) = driver.add([4] * 4, adapter="b", max_tokens=2, ignore_eos=True)
    driver.run()
    (after,) = driver.add([5] * 4, adapter="b", max_tokens=2, ignore_eos=True)
    driver.run()
    assert [s.weights for s in (first, between, after)] == ["a", PLAIN, "b"]


def test_all_choices_of_a_request_have_the_same_weights():
    driver = make_driver(Fixed("a"))
    resident(driver, "a")
    added = driver.add([1] * 9, adapter="a", n=3)
    driver.step()
    driver.scheduler.modes.policy = Fixed(PLAIN)
    driver.run()
    assert [sequence.weights for sequence in added] == ["a"] * 3
    for sequence in added:
        check_answer(driver, sequence)


def test_what_cannot_be_merged_or_has_left_is_not_held():
    driver = make_driver(Fixed("e"))
    resident(driver, "e")
    (sequence,) = driver.add([1] * 5, adapter="e")
    driver.run()
    assert sequence.weights == PLAIN
    driver = make_driver(Fixed("gone"))
    resident(driver, "a")
    (sequence,) = driver.add([1] * 5)
    driver.run()
    assert sequence.weights == PLAIN


def test_a_sequence_that_starves_for_a_slot_gets_the_merged_adapters():
    """One slot: rows of the base would hold it for the merged adapter for ever."""
    patience = limits(num_pages=64, max_num_seqs=6, max_num_batched_tokens=24, adapter_wait_s=40.0)
    driver = make_driver(Fixed("a"), num_slots=1, bounds=patience)
    resident(driver, "a")
    (waiter,) = driver.add([7] * 4, adapter="b", max_tokens=2)
    for _ in range(60):
        driver.add([8] * 3, max_tokens=3)
        driver.step()
    driver.run()
    assert waiter.finish_reason is not FinishReason.ERROR


@pytest.mark.parametrize("theta", [0.0, 3.0])
def test_no_running_sequence_is_left_out_for_longer_than_theta_and_a_step(theta):
    driver = make_driver(Fixed("a"), mixture=False, theta=theta)
    resident(driver, "a")
    for name in ("a", "a", "a", ""):
        driver.add([1] * 3, adapter=name, max_tokens=30, ignore_eos=True)
    begun = len(driver.plans)
    driver.run()
    steps = kinds(driver, begun)
    last = max(i for i, (merged, _) in enumerate(steps) if merged)
    gaps, since = [], {None: 0, "a": 0}
    for i, (merged, _) in enumerate(steps[:last]):
        gaps.append(i - since[merged])
        since[merged] = i
    assert 2 <= max(gaps) <= theta + 2


@pytest.mark.parametrize("mixture", [True, False], ids=["auto", "exact"])
@pytest.mark.parametrize("seed", range(4, 10))
def test_random_walk_gives_every_sequence_what_its_arithmetic_gives_alone(seed, mixture):
    rng = random.Random(seed)
    bounds = limits(num_pages=13) if seed % 2 else ROOMY
    driver = make_driver(Restless(rng), mixture=mixture, bounds=bounds, ticks=rng.randrange(1, 5))
    added, requests = [], []
    for _ in range(200):
        if rng.random() < 0.35:
            prompt = [rng.randrange(1, 3)] * rng.randrange(1, 14)
            name = rng.choice(["", "a", "a", "b", "e"])
            options = {"n": rng.choice([1, 1, 2]), "max_tokens": rng.randrange(1, 16)}
            scores = 1 if rng.random() < 0.2 else None
            requests.append(driver.add(prompt, adapter=name, prompt_logprobs=scores, **options))
            added += requests[-1]
        if requests and rng.random() < 0.05:
            driver.ended += driver.scheduler.abort(rng.choice(requests)[0].request.request_id)
        driver.step(depth=rng.choice([0, 1, 2]))
    driver.run(max_steps=3000)
    for sequence in added:
        check_answer(driver, sequence)
    merged = {merged for merged, _ in kinds(driver)}
    assert {None} < merged <= {None, "a", "b"}
    assert any(plan.is_mixture for plan in driver.plans) == mixture
    assert not any(driver.residency.users.values())
