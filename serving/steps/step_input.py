"""Input of a step as plain data: what every process of an instance does before and in a step.

The process that plans makes it of a plan; where an instance is over several hosts, the others get
it and run the same step. Of pages it has the new ones only.
"""

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from serving.api.request import PageMove, ScheduledChunk, Sequence, StepPlan
from serving.steps.device_state import PackedPrompt, PackedRow, pack_prompt, pack_row
from serving.steps.step import (
    BY_HEAD,
    NUM_TARGETS,
    NUM_TOKENS,
    SAMPLES,
    SLOT,
    START,
    TABLE_ROWS,
    StepSizes,
)
from serving.steps.step_programs import Program
from serving.steps.step_results import num_targets


@dataclasses.dataclass(frozen=True, eq=False)
class NewPages:
    """Pages that a row's block table has from place `first` on, times the pages' stride."""

    row: int
    first: int
    pages: np.ndarray  # int32


@dataclasses.dataclass(frozen=True, eq=False)
class StepInput:
    """A step, or its forward part where masks follow: first `moves`, then rows, then tables."""

    program: Program
    table: np.ndarray  # int32 [table_rows, seqs]
    moves: tuple[PageMove, ...]
    admitted: tuple[tuple[int, PackedRow | PackedPrompt], ...]  # by row
    pages: tuple[NewPages, ...]
    in_parts: bool


@dataclasses.dataclass(frozen=True, eq=False)
class SampleInput:
    """Masks of the rows of a step whose forward part has been sent."""

    masks: np.ndarray  # HostMasks.packed
    bucket: int


class StepInputs:
    """Makes inputs of plans, and knows which pages the device's tables have."""

    def __init__(self, sizes: StepSizes, vocab_size: int, end_ids: tuple[int, ...]):
        """`end_ids` are held back before a request's min_tokens."""
        self._sizes, self._vocab_size, self._end_ids = sizes, vocab_size, end_ids
        self._num_pages = [0] * sizes.max_seqs  # of each row

    def make(self, plan: StepPlan, program: Program, *, in_parts: bool) -> StepInput:
        """Return the input of the plan's step, which must run."""
        admitted = tuple([(sequence.row, self._packed(sequence)) for sequence in plan.admitted])
        for row, _ in admitted:
            self._num_pages[row] = 0
        pages = tuple(self._new_pages([chunk.sequence for chunk in plan.chunks]))
        return StepInput(program, self._table(plan), plan.moves, admitted, pages, in_parts)

    def empty_table(self) -> np.ndarray:
        """Return the table of a step without rows."""
        return np.zeros((self._sizes.table_rows, self._sizes.max_seqs), np.int32)

    def _table(self, plan: StepPlan) -> np.ndarray:
        """Return the table; many chunks at once, as numpy takes as long for one as for a column."""
        table = self.empty_table()
        if len(plan.chunks) <= _FEW_CHUNKS:
            for row, *numbers in map(_column, plan.chunks):
                assert row >= 0, _NO_ROW
                table[: len(numbers), row] = numbers
            self._add_drafts(table, plan)
            return table
        numbers = itertools.chain.from_iterable(map(_column, plan.chunks))
        shape = len(plan.chunks), 1 + len(_FIELDS)
        columns = np.fromiter(numbers, np.int32, shape[0] * shape[1]).reshape(shape)
        assert columns[:, 0].min() >= 0, _NO_ROW
        table[_FIELDS, columns[:, 0]] = columns[:, 1:].T
        self._add_drafts(table, plan)
        return table

    def _add_drafts(self, table: np.ndarray, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.drafts:
                row = chunk.sequence.row
                table[TABLE_ROWS : TABLE_ROWS + len(chunk.drafts), row] = chunk.drafts

    def _packed(self, sequence: Sequence) -> PackedRow | PackedPrompt:
        if sequence.request.head is not None:
            return pack_prompt(sequence.token_ids, self._sizes.max_len, self._vocab_size)
        return pack_row(
            sequence.request.sampling,
            sequence.token_ids,
            sequence.num_prompt,
            sequence.seed,
            self._end_ids,
            self._sizes.max_len,
            self._vocab_size,
            sequence.request.bad_words,
        )

    def _new_pages(self, sequences: Iterable[Sequence]) -> list[NewPages]:
        """Return what is new of each; pages of a running sequence only grow."""
        found: list[NewPages] = []
        for sequence in sequences:
            row, pages = sequence.row, sequence.pages
            first = self._num_pages[row]
            if len(pages) != first:
                self._num_pages[row] = len(pages)
                new = np.array(pages[first:], np.int32) * np.int32(self._sizes.page_stride)
                found.append(NewPages(row, first, new))
        return found


_FEW_CHUNKS = 4  # are written one by one sooner than all at once
_NO_ROW = "a step of a sequence that has ended or waits"
_FIELDS = np.array([START, NUM_TOKENS, SLOT, NUM_TARGETS, SAMPLES])[:, None]  # of _column


def _column(chunk: ScheduledChunk) -> tuple[int, ...]:
    """Return a chunk's sequence row and its numbers in the table, in the order of _FIELDS."""
    sequence, start, num_tokens, samples, prompt_logprobs, by_head, drafts = chunk
    if not (prompt_logprobs or by_head or drafts):  # as nearly all of them are
        return sequence.row, start, num_tokens, sequence.slot, 0, samples
    samples = BY_HEAD if by_head else samples + len(drafts)
    targets = num_targets(chunk) if prompt_logprobs else 0
    return sequence.row, start, num_tokens, sequence.slot, targets, samples


def is_scored(plan: StepPlan) -> bool:
    """Return whether log-probabilities of a row are wanted."""
    for chunk in plan.chunks:
        if chunk.prompt_logprobs or chunk.sequence.request.sampling.logprobs is not None:
            return True
    return False
