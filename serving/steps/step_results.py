"""Steps on their way through the device, and what the host reads of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lora_jax.adapters.row_copies import has_ended
from serving.api.request import ScheduledChunk, SequenceResult, StepPlan, TokenLogprobs
from serving.steps.forwarded import Forwarded
from serving.steps.sampling.sampler import INVALID_TOKEN, Sampled

# Posts the masks of a plan, whose chunks' first samples have these logit rows, under a number.
MasksFirst = Callable[[StepPlan, list[int], int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class InFlightStep:
    """A dispatched step: what it was asked, and arrays that will hold its results."""

    plan: StepPlan
    first_rows: tuple[int, ...]  # first logit row of each chunk, in the plan's order
    sampled: Sampled
    scored: bool  # whether any row's log-probabilities are wanted
    remote_status: jax.Array | None = None  # int32 [servers] of the LoRA Server, if there is one
    number: int = 0  # of the masks that the step reads from the board; 0: of none
    waits: bool = False  # for them, on the device

    def runs(self) -> bool:
        """Return whether the device has not ended it yet."""
        return not has_ended(self.sampled.token_ids)

    @property
    def first_samples(self) -> list[int]:
        """The logit row of each chunk's first sample."""
        return first_samples(self.plan, self.first_rows)


@dataclasses.dataclass(frozen=True, eq=False)
class HeldStep:
    """A step whose forward part is dispatched and whose sample part waits for masks."""

    plan: StepPlan
    first_rows: tuple[int, ...]
    scored: bool
    bucket: int
    forwarded: Forwarded
    remote_status: jax.Array | None

    @property
    def first_samples(self) -> list[int]:
        """The logit row of each chunk's first sample."""
        return first_samples(self.plan, self.first_rows)


def in_flight(
    plan: StepPlan,
    first_rows: tuple[int, ...],
    sampled: Sampled,
    scored: bool,
    status: jax.Array | None,
    number: int = 0,
    waits: bool = False,
) -> InFlightStep:
    """Return the step, its results on their way to the host."""
    if _is_host():
        return InFlightStep(plan, first_rows, sampled, scored, status, number, waits)
    wanted = [sampled.token_ids]
    if scored:
        wanted += [sampled.logprobs, sampled.ranks, sampled.top_ids, sampled.top_logprobs]
    if sampled.heads is not None and any(chunk.by_head for chunk in plan.chunks):
        wanted.append(sampled.heads)
    if status is not None:
        wanted.append(status)
    for leaf in wanted:
        leaf.copy_to_host_async()
    return InFlightStep(plan, first_rows, sampled, scored, status, number, waits)


@functools.cache
def _is_host() -> bool:
    """Return whether results lie in the host's memory: asking for a copy takes some 30 us each."""
    return jax.default_backend() == "cpu"


def first_rows(plan: StepPlan) -> tuple[int, ...]:
    """Return where each chunk's logit rows start: they stand in order of sequence rows.

    A chunk whose task head answers has none; its place is its sequence row, as head logits stand.
    To be asked before the step: the scheduler may take a row away while the step runs.
    """
    chunks = plan.chunks
    if len(chunks) == 1:
        return (chunks[0].sequence.row if chunks[0].by_head else 0,)
    rows = [chunk.sequence.row for chunk in chunks]
    firsts, first = [0] * len(chunks), 0
    for index in sorted(range(len(chunks)), key=rows.__getitem__):
        chunk = chunks[index]
        firsts[index] = rows[index] if chunk.by_head else first
        first += num_rows(chunk) if chunk.prompt_logprobs or chunk.drafts else chunk.samples
    return tuple(firsts)


def num_rows(chunk: ScheduledChunk) -> int:
    """Return how many logit rows a chunk takes."""
    return num_targets(chunk) + chunk.num_samples


def num_logit_rows(plan: StepPlan) -> int:
    """Return how many logit rows a step takes."""
    return sum(
        [
            num_rows(chunk) if chunk.prompt_logprobs or chunk.drafts else chunk.samples
            for chunk in plan.chunks
        ]
    )


def first_samples(plan: StepPlan, firsts: tuple[int, ...]) -> list[int]:
    """Return the logit row of each chunk's first sample; `firsts` are the plan's first rows."""
    return [first + num_targets(chunk) for chunk, first in zip(plan.chunks, firsts, strict=True)]


def num_targets(chunk: ScheduledChunk) -> int:
    """Return how many prompt tokens the chunk scores: those after its tokens."""
    if not chunk.prompt_logprobs:
        return 0
    end = min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt - 1)
    return max(0, end - chunk.start)


class HostArrays:
    """A finished step's results on the host."""

    def __init__(self, step: InFlightStep):
        chunks = step.plan.chunks
        by_head = [chunk.by_head for chunk in chunks]
        self._scored = step.scored
        self._heads = np.asarray(step.sampled.heads) if any(by_head) else None
        # A look at an array takes the host some 10 us; heads' rows have no tokens.
        self.token_ids = [] if all(by_head) else np.asarray(step.sampled.token_ids).tolist()
        if step.scored:
            self.logprobs = np.asarray(step.sampled.logprobs).tolist()
            self.ranks = np.asarray(step.sampled.ranks).tolist()
            self.top_ids = np.asarray(step.sampled.top_ids)
            self.top_logprobs = np.asarray(step.sampled.top_logprobs)

    def result(self, chunk: ScheduledChunk, first: int) -> SequenceResult:
        """Return the result of a chunk whose place in `first_rows` is `first`."""
        if chunk.by_head:
            return self._of_head(chunk, first)
        if chunk.samples and not (self._scored or chunk.prompt_logprobs or chunk.drafts):
            # As nearly all of them are; without the constructor, which takes as long as the rest.
            return tuple.__new__(SequenceResult, (chunk, self.token_ids[first], None, (), None, ()))
        sampling = chunk.sequence.request.sampling
        targets = num_targets(chunk)
        scored: tuple[TokenLogprobs, ...] = ()
        if targets:
            wanted = sampling.prompt_logprobs
            count = (sampling.logprobs or 0) if wanted is None else wanted
            scored = tuple(self._entry(first + index, count) for index in range(targets))
        if not chunk.samples:
            return SequenceResult(chunk, None, None, scored)
        row = first + targets
        more: tuple[SequenceResult, ...] = ()
        if chunk.drafts:
            right = range(row + 1, row + 1 + self._num_right(chunk, row))
            more = tuple(self._sample(chunk, place) for place in right)
        return self._sample(chunk, row, scored, more)

    def _num_right(self, chunk: ScheduledChunk, row: int) -> int:
        """Return how many of the chunk's drafts, from the first on, are what was drawn.

        One that is followed by bad logits does not count: its result comes alone in a next step.
        """
        drawn, count = self.token_ids[row : row + chunk.num_samples], 0
        while count < len(chunk.drafts) and drawn[count] == chunk.drafts[count]:
            count += 1
        return count - (count > 0 and drawn[count] < 0)

    def _sample(
        self,
        chunk: ScheduledChunk,
        row: int,
        scored: tuple[TokenLogprobs, ...] = (),
        more: tuple[SequenceResult, ...] = (),
    ) -> SequenceResult:
        count = chunk.sequence.request.sampling.logprobs
        entry = None if count is None else self._entry(row, count)
        return SequenceResult(chunk, self.token_ids[row], entry, scored, more=more)

    def _of_head(self, chunk: ScheduledChunk, row: int) -> SequenceResult:
        assert self._heads is not None, "a head was asked in an engine without heads"
        logits = self._heads[row]
        bad = None if np.logical_and.reduce(np.isfinite(logits)) else INVALID_TOKEN
        return SequenceResult(chunk, bad, head=logits)

    def _entry(self, row: int, count: int) -> TokenLogprobs:
        ids, values = self.top_ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist()
        return TokenLogprobs(
            self.token_ids[row],
            self.logprobs[row],
            self.ranks[row],
            dict(zip(ids, values, strict=True)),
        )


def read_all(results: Any) -> None:
    """Bring results of a step to the host, as any step does, so that none is the first."""
    jax.device_get(jax.tree.leaves(results))
