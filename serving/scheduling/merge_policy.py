"""Policies of merged weights: which adapter to merge, which weights a step takes. No jax.

Two of them: Algorithm 1 of V-LoRA (section 4.4.3) as the paper prints it, and the one that the
engine uses, which weighs costs. Both are functions of plain data; simulations call the same code.

The engine's policy differs because a sequence keeps its arithmetic to its end: a switch is free for
sequences that run, and only those that begin later follow it. The plain weights stay beside the
merged ones, so that steps of both kinds alternate while sequences of both kinds are left.
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Hashable, Mapping, Sequence

PLAIN = ""  # no adapter is merged into the weights


class Mode(enum.Enum):
    """Mode of one step of Algorithm 1."""

    MERGED = "merged"
    MIXTURE = "mixture"
    UNMERGED = "unmerged"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request as Algorithm 1 sees it.

    `credit` is how long it has waited, plus the time of a step in the present mode, plus that of a
    switch; in seconds.
    """

    adapter: Hashable
    credit: float = 0.0


@dataclasses.dataclass(frozen=True)
class PaperStep:
    """The next step of Algorithm 1: mode, merged adapter, places of the batch's requests."""

    mode: Mode
    adapter: Hashable | None
    batch: tuple[int, ...]


def paper_step(requests: Sequence[Asked], theta: float, max_batch: int) -> PaperStep:
    """Return the next step by Algorithm 1 of V-LoRA; `requests` stand in order of arrival.

    Requests with a credit above `theta` starve. While fewer than half a batch starve and more than
    half a batch ask for one adapter, that adapter is merged: alone if none starves, else in a
    mixture with those that do. Raises ValueError for a batch below 1.
    """
    if max_batch < 1:
        raise ValueError(f"max_batch must be at least 1, got {max_batch}.")
    starving = [i for i, request in enumerate(requests) if request.credit > theta]
    counts = collections.Counter(request.adapter for request in requests)
    adapter = max(counts, key=counts.__getitem__, default=None)
    merged = [i for i, request in enumerate(requests) if request.adapter == adapter]
    if len(starving) / max_batch < 0.5 and len(merged) / max_batch > 0.5:
        if not starving:
            return PaperStep(Mode.MERGED, adapter, tuple(merged[:max_batch]))
        batch = _first(starving, merged, max_batch)
        return PaperStep(Mode.MIXTURE, adapter, batch)
    return PaperStep(Mode.UNMERGED, None, _first(starving, range(len(requests)), max_batch))


def _first(before: Sequence[int], after: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*before, *after)))[:most]


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Costs in the time that one row takes in the base's maps.

    The defaults are those of 125 million parameters in bfloat16 with adapters of rank 64 on two
    cores, from `python -m bench.merge_modes --costs`. A choice depends on their proportions only.
    """

    step: float = 5.0  # of a step besides its rows: the weights are read once
    lora_row: float = 0.12  # of one adapter's part of one row
    adapter: float = 0.55  # of each adapter in a step: its rank rows are read once
    branch: float = 0.5  # of a mixture: the launches that take the merged adapter out
    switch: float = 500.0  # of a merge pass, and of the steps of two kinds until old rows end


@dataclasses.dataclass(frozen=True)
class MergeTarget:
    """The adapter that new sequences find merged, and how much another choice would have saved."""

    adapter: str = PLAIN
    regret: float = 0.0


class MergePolicy:
    """Chooses the adapter to merge by costs, with hysteresis. Holds no state.

    Every step adds to the regret what the best other choice would have saved; where it would have
    cost more, the regret falls, to 0 at least. When it exceeds the cost of a switch, the choice
    changes: a change of the mix that lasts is followed, a short one is not.
    """

    def __init__(self, costs: StepCosts = StepCosts(), *, mixture: bool):
        """With `mixture` rows of others run in the merged adapter's step, at two parts a row."""
        self.costs, self._mixture = costs, mixture

    def step_cost(self, adapter: str, rows: Mapping[str, int]) -> float:
        """Return what a token of every row costs, beyond one step and its rows' base part.

        `rows` are sequences by adapter, PLAIN being the base model.
        """
        costs, base = self.costs, rows.get(PLAIN, 0)
        others = [n for other, n in rows.items() if n and other not in (PLAIN, adapter)]
        lora_cost = costs.lora_row * sum(others) + costs.adapter * len(others)
        if adapter == PLAIN or not (others or base):
            return lora_cost
        if self._mixture:
            surplus = costs.lora_row * (sum(others) + base)
            return lora_cost + surplus + costs.adapter + costs.branch
        return lora_cost + costs.step * (rows.get(adapter, 0) > 0)

    def next(
        self, target: MergeTarget, rows: Mapping[str, int], can_merge: Callable[[str], bool]
    ) -> MergeTarget:
        """Return the target after one more step with these rows."""
        other = self._best_other(target.adapter, rows, can_merge)
        if other is None:
            return target
        saving = self.step_cost(target.adapter, rows) - self.step_cost(other, rows)
        regret = max(0.0, target.regret + saving)
        if regret > self.costs.switch:
            return MergeTarget(other)
        return MergeTarget(target.adapter, regret)

    def _best_other(
        self, adapter: str, rows: Mapping[str, int], can_merge: Callable[[str], bool]
    ) -> str | None:
        """Return the best choice besides the present one: plain weights, or the top adapter."""
        ranked = sorted((a for a in rows if a != PLAIN), key=lambda a: (-rows[a], a))
        choices = [PLAIN, *(a for a in ranked[:1] if can_merge(a))]
        others = [choice for choice in choices if choice != adapter]
        return min(others, key=lambda other: self.step_cost(other, rows), default=None)


def due(rows: Mapping[str, int], waited_s: Mapping[str, float], theta: float) -> str:
    """Return which weights the next step takes: those of most rows, unless others starve.

    `rows` are the sequences that could run by the adapter merged into their weights, `waited_s` how
    long each of them has been left out. The longest that waited beyond `theta` comes first, so that
    no sequence is left out for longer than `theta` and one step.
    """
    starving = [adapter for adapter in rows if waited_s.get(adapter, 0.0) > theta]
    if starving:
        return max(starving, key=lambda adapter: (waited_s[adapter], adapter))
    return max(rows, key=lambda adapter: (rows[adapter], adapter), default=PLAIN)
