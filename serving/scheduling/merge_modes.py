"""Merged weights in the schedule: which sequences run on them, and which step takes them. No jax.

A sequence keeps its arithmetic to its end: plain weights, or those with one adapter merged into
them. It is chosen when the first sequence of its request is admitted. Steps of both kinds alternate
while there are sequences of both. There is one merged copy of the weights: another adapter gets it
when no sequence needs it any more.
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Protocol

from serving.api.request import Merged, Sequence, StepPlan
from serving.scheduling.merge_policy import PLAIN, MergePolicy, MergeTarget, due

_ANEW = MergeTarget()


class MergeResidency(Protocol):
    """The LoRA adapters on the device, as `loading.lora_residency` has them. Keys are digests."""

    def can_merge(self, digest: str) -> bool:
        """True for an adapter that merged weights can stand for."""
        ...

    def acquire(self, digest: str) -> int | None:
        """Return the slot and count one more user; None while the adapter is not resident."""
        ...

    def release(self, digest: str) -> None:
        """Count one user less."""
        ...


class MergeModes:
    """Weights of sequences and steps; the engine's thread uses it.

    `policy` may be replaced by another object with its `next`, to measure or test one.
    """

    def __init__(self, residency: MergeResidency, *, mixture: bool, theta: float):
        """With `mixture` rows of others run on merged weights too. No sequence is left out of steps
        for longer than `theta` seconds and a step.
        """
        self._residency, self._mixture, self._theta = residency, mixture, theta
        self.policy = MergePolicy(mixture=mixture)
        self._target = MergeTarget()
        self._merged: Merged | None = None  # whose slot is held
        self._users = 0  # live sequences on merged weights
        self._step = PLAIN  # weights of the step that is planned
        self._left_out_s: dict[str, float] = {}  # since when, by weights

    @property
    def target(self) -> MergeTarget:
        """The policy's choice for sequences that begin."""
        return self._target

    def reset(self, target: MergeTarget = _ANEW) -> None:
        """Begin anew from a target, by default plain weights; sequences that run keep theirs."""
        self._target = target

    def begin(
        self,
        running: Iterable[Sequence],
        waiting: Iterable[Sequence],
        now: float,
        *,
        starving: bool,
    ) -> list[str]:
        """Return the weights that the next step may take, the ones that are due first.

        While a sequence is `starving` for a slot none is held for new sequences. `end` must follow.
        """
        if starving:
            self.reset()
        target = self._target.adapter
        if target != PLAIN and not self._users and self._residency.can_merge(target):
            self._hold(target, running, waiting)
        if self._merged is None:
            return [PLAIN]
        rows = collections.Counter(s.weights or PLAIN for s in running if s.num_remaining)
        rows.update(map(self.weights_of, waiting))
        waited = {weights: now - since for weights, since in self._left_out_s.items()}
        first = due(rows, waited, self._theta)
        self._left_out_s = {weights: self._left_out_s.get(weights, now) for weights in rows}
        return [first, *(weights for weights in rows if weights != first)]

    def take(self, weights: str) -> None:
        """Plan the step for these weights."""
        self._step = weights

    def joins(self, sequence: Sequence) -> bool:
        """True if the sequence can run in the step that is planned."""
        return self.weights_of(sequence) == self._step

    def weights_of(self, sequence: Sequence) -> str:
        """Return the weights that a sequence has, or that it would get if it began now."""
        if sequence.weights is not None:
            return sequence.weights
        target = self._target.adapter
        if self._merged is None or target != self._merged.digest:
            return PLAIN
        return target if self._mixture or sequence.request.adapter_digest == target else PLAIN

    def choose(self, siblings: Iterable[Sequence]) -> list[Sequence]:
        """Give all sequences of a request their weights; return those that now have merged ones."""
        chosen = [sequence for sequence in siblings if sequence.weights is None]
        weights = self.weights_of(chosen[0]) if chosen else PLAIN
        for sequence in chosen:
            sequence.weights = weights
        if weights == PLAIN:
            return []
        self._users += len(chosen)
        return chosen

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if sequence.weights:
            self._users -= 1
            self._release_unused()

    def end(
        self, plan: StepPlan | None, running: Iterable[Sequence], now: float
    ) -> StepPlan | None:
        """Return the plan with its weights; the policy sees what ran."""
        if plan is not None:
            rows = collections.Counter(s.request.adapter_digest for s in running)
            self._target = self.policy.next(self._target, rows, self._residency.can_merge)
            if self._left_out_s:
                self._left_out_s[self._step] = now
            if self._step != PLAIN:
                plan = dataclasses.replace(plan, merged=self._merged)
        self._release_unused()
        return plan

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError when the count of users is not that of the live sequences."""
        users = [sequence.weights for sequence in live if sequence.weights]
        assert len(users) == self._users, f"{len(users)} sequences, {self._users} counted"
        held = None if self._merged is None else self._merged.digest
        assert set(users) == ({held} if held else set()), f"weights {set(users)}, held {held}"

    def _hold(self, digest: str, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Hold the adapter's slot for as long as sequences need it, if it has one and any wait."""
        if not any(sequence.weights is None for sequence in waiting):
            return
        slot = self._residency.acquire(digest)
        if slot is not None:
            live = (s.request for s in (*running, *waiting))
            names = (request.adapter for request in live if request.adapter_digest == digest)
            self._merged = Merged(digest, slot, next(names, None) or digest[:12])

    def _release_unused(self) -> None:
        if self._merged is not None and not self._users:
            self._residency.release(self._merged.digest)
            self._merged = None
            self._left_out_s = {}
