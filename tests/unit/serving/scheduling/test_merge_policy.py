"""Algorithm 1 of V-LoRA as printed, and the engine's policy against fixed and exhaustive ones."""

import collections
import itertools
import random

import pytest

from serving.scheduling.merge_policy import (
    PLAIN,
    Asked,
    MergePolicy,
    MergeTarget,
    Mode,
    PaperStep,
    StepCosts,
    due,
    paper_step,
)

THETA = 1.0
COSTS = StepCosts()
ROW, ADAPTER = COSTS.lora_row, COSTS.adapter
SKEWS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def asked(adapters: str, starving: str = "") -> list[Asked]:
    """A request for each letter; those of `starving` have waited too long."""
    return [Asked(adapter, 2.0 if adapter in starving else 0.5) for adapter in adapters]


# Algorithm 1.


def test_most_of_a_batch_for_one_adapter_is_merged_alone():
    step = paper_step(asked("abaaab"), THETA, 6)
    assert step == PaperStep(Mode.MERGED, "a", (0, 2, 3, 4))


def test_those_that_starve_join_in_a_mixture():
    step = paper_step(asked("aabaaac", starving="c"), THETA, 6)
    assert step == PaperStep(Mode.MIXTURE, "a", (6, 0, 1, 3, 4, 5))


def test_a_starving_request_of_the_merged_adapter_is_taken_once():
    requests = [Asked("a", 2.0), *asked("aaa")]
    assert paper_step(requests, THETA, 4) == PaperStep(Mode.MIXTURE, "a", (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("adapters", "starving"),
    [("aaaaccc", "c"), ("aaabbb", ""), ("aa", ""), ("", "")],
    ids=["half starve", "half ask for it", "too few", "none"],
)
def test_otherwise_the_step_is_unmerged_and_who_starves_comes_first(adapters, starving):
    step = paper_step(asked(adapters, starving), THETA, 6)
    assert (step.mode, step.adapter) == (Mode.UNMERGED, None)
    first = [i for i, adapter in enumerate(adapters) if adapter in starving]
    rest = [i for i, adapter in enumerate(adapters) if adapter not in starving]
    assert step.batch == tuple([*first, *rest][:6])


def test_no_request_waits_longer_than_theta_and_a_step():
    """Arrivals at the rate of service: the starved come first, in order."""
    rng, waiting, worst = random.Random(0), [], 0
    for now in range(2000):
        waiting += [(rng.choice("aaaab"), now) for _ in range(4)]
        requests = [Asked(adapter, now - since + 1) for adapter, since in waiting]
        chosen = set(paper_step(requests, 5, 4).batch)
        worst = max([worst, *(now - waiting[i][1] for i in chosen)])
        waiting = [one for i, one in enumerate(waiting) if i not in chosen]
    assert worst <= 5 + 1


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        paper_step([], THETA, 0)


# The engine's policy.


@pytest.mark.parametrize(
    ("rows", "adapter", "mixture", "want"),
    [
        ({"a": 3, PLAIN: 2}, PLAIN, True, 3 * ROW + ADAPTER),
        ({"a": 3, "b": 2, PLAIN: 4}, "a", True, 8 * ROW + 2 * ADAPTER + COSTS.branch),
        ({"a": 3, "b": 2, PLAIN: 4}, "a", False, 2 * ROW + ADAPTER + COSTS.step),
        ({"a": 3}, "a", False, 0.0),
        ({"a": 3}, "a", True, 0.0),
        ({"b": 3, "a": 0}, "a", False, 3 * ROW + ADAPTER),
    ],
    ids=["plain", "mixture", "two kinds", "merged alone", "one kind", "merged for nobody"],
)
def test_cost_of_a_choice(rows, adapter, mixture, want):
    assert MergePolicy(COSTS, mixture=mixture).step_cost(adapter, rows) == pytest.approx(want)


def follow(policy, mixes, can_merge=lambda adapter: True):
    """Return the choices that follow each other over steps of these mixes."""
    target, choices = MergeTarget(), []
    for rows in mixes:
        target = policy.next(target, rows, can_merge)
        choices.append(target.adapter)
    return choices


def test_a_lasting_mix_is_followed_and_a_short_one_is_not():
    policy = MergePolicy(COSTS, mixture=True)
    busy, even = {"a": 30, "b": 2}, {"a": 16, "b": 16}
    saving = policy.step_cost(PLAIN, busy) - policy.step_cost("a", busy)
    enough = int(COSTS.switch / saving) + 1
    assert set(follow(policy, [busy] * (enough - 1) + [even] * 500)) == {PLAIN}
    assert follow(policy, [busy] * enough)[-1] == "a"


def test_another_adapter_and_the_base_take_over():
    policy = MergePolicy(COSTS, mixture=True)
    choices = follow(policy, [{"a": 30}] * 500 + [{"b": 30}] * 500 + [{PLAIN: 30}] * 500)
    assert [choices[499], choices[999], choices[1499]] == ["a", "b", PLAIN]


def test_what_cannot_be_merged_is_not_chosen():
    policy = MergePolicy(COSTS, mixture=True)
    assert set(follow(policy, [{"a": 30}] * 500, lambda adapter: False)) == {PLAIN}


def test_an_idle_engine_keeps_its_choice():
    policy = MergePolicy(COSTS, mixture=True)
    assert policy.next(MergeTarget("a", 3.0), {}, bool) == MergeTarget("a", 3.0)


class Model:
    """Sequences of random lengths that follow each other, each with its arithmetic to the end."""

    def __init__(self, skew: float, *, mixture: bool, rows: int = 32, seed: int = 1):
        self._skew, self._mixture, self._rng = skew, mixture, random.Random(seed)
        self._rows = [self._new(PLAIN) for _ in range(rows)]
        self._policy = MergePolicy(COSTS, mixture=mixture)

    def _new(self, adapter: str) -> list:
        name = "top" if self._rng.random() < self._skew else f"other {self._rng.randrange(15)}"
        weights = adapter if self._mixture or name == adapter else PLAIN
        return [name, weights, self._rng.randrange(8, 64)]

    def run(self, tokens: int, choose) -> float:
        """Return the cost of so many tokens when `choose` gives the target of each step."""
        cost, done, shadow, target = 0.0, 0, PLAIN, MergeTarget()
        while done < tokens:
            rows = collections.Counter(name for name, *_ in self._rows)
            target = choose(self._policy, target, rows)
            in_use = {weights for _, weights, _ in self._rows} - {PLAIN}
            if target.adapter not in (PLAIN, shadow) and not in_use - {target.adapter}:
                shadow, cost = target.adapter, cost + COSTS.step
            usable = target.adapter if target.adapter in (PLAIN, shadow) else PLAIN
            for weights in {weights for _, weights, _ in self._rows}:
                cost += COSTS.step + self._rows_cost(weights)
            done += len(self._rows)
            for i, row in enumerate(self._rows):
                row[2] -= 1
                if not row[2]:
                    self._rows[i] = self._new(usable)
        return cost / done

    def _rows_cost(self, weights: str) -> float:
        rows = collections.Counter(name for name, own, _ in self._rows if own == weights)
        return sum(rows.values()) + self._policy.step_cost(weights, rows)


def shipped(policy, target, rows):
    return policy.next(target, rows, lambda adapter: True)


@pytest.mark.parametrize("mixture", [True, False], ids=["auto", "exact"])
@pytest.mark.parametrize("skew", SKEWS)
def test_never_over_two_per_cent_worse_than_the_better_fixed_choice(skew, mixture):
    tokens = 40_000
    ours = Model(skew, mixture=mixture).run(tokens, shipped)
    unmerged = Model(skew, mixture=mixture).run(tokens, lambda *_: MergeTarget())
    merged = Model(skew, mixture=mixture).run(tokens, lambda *_: MergeTarget("top"))
    assert ours <= 1.02 * min(unmerged, merged), (ours, unmerged, merged)


def test_a_skewed_mix_gains():
    unmerged = Model(0.95, mixture=True).run(80_000, lambda *_: MergeTarget())
    assert Model(0.95, mixture=True).run(80_000, shipped) < 0.97 * unmerged


@pytest.mark.parametrize("seed", range(20))
def test_within_a_bound_of_the_best_sequence_of_choices(seed):
    """All sequences of choices over phases of a random mix, a switch between them costing one."""
    rng, policy = random.Random(seed), MergePolicy(COSTS, mixture=True)
    phases = []
    for _ in range(5):
        top = rng.choice("ab")
        phases.append(({top: rng.randrange(8, 33), "c": rng.randrange(12)}, rng.randrange(1, 800)))

    def cost(choices):
        steps = sum(
            n * policy.step_cost(c, rows) for c, (rows, n) in zip(choices, phases, strict=True)
        )
        return steps + COSTS.switch * sum(a != b for a, b in itertools.pairwise((PLAIN, *choices)))

    best = min(cost(choices) for choices in itertools.product((PLAIN, "a", "b"), repeat=5))
    mixes = [rows for rows, count in phases for _ in range(count)]
    chosen = follow(policy, mixes)
    ours = sum(
        policy.step_cost(c, rows) for c, rows in zip((PLAIN, *chosen[:-1]), mixes, strict=True)
    )
    ours += COSTS.switch * sum(a != b for a, b in itertools.pairwise((PLAIN, *chosen)))
    # Three choices: each of the others is regretted for the cost of a switch, which then is paid.
    assert ours <= 3 * best + 3 * COSTS.switch


# Which weights a step takes.


@pytest.mark.parametrize(
    ("rows", "waited", "want"),
    [
        ({"a": 9, PLAIN: 2}, {}, "a"),
        ({"a": 9, PLAIN: 2}, {PLAIN: 1.5}, PLAIN),
        ({"a": 9, PLAIN: 2}, {PLAIN: 1.0}, "a"),
        ({PLAIN: 2}, {}, PLAIN),
        ({}, {}, PLAIN),
    ],
    ids=["most rows", "starves", "not yet", "only one", "none"],
)
def test_which_weights_are_due(rows, waited, want):
    assert due(rows, waited, THETA) == want


@pytest.mark.parametrize("theta", [0.0, 0.35, 5.0])
def test_no_sequence_is_left_out_for_longer_than_theta_and_a_step(theta):
    rng, waited, longest = random.Random(3), {PLAIN: 0.0, "a": 0.0}, 0.0
    for _ in range(3000):
        rows = {PLAIN: rng.randrange(1, 9), "a": rng.randrange(1, 33)}
        chosen, step_s = due(rows, waited, theta), rng.uniform(0.01, 0.1)
        waited = {name: 0.0 if name == chosen else s + step_s for name, s in waited.items()}
        longest = max(longest, *waited.values())
    assert longest <= theta + 0.1
