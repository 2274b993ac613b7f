"""The masks of one step's rows: which tokens each bound sequence may take next. No jax.

The engine's thread asks once the tokens of the step before are known, and while the forward part of
the step runs. Tokens are fed to a matcher when they are in the sequence, so a preempted sequence
keeps its place, and a step whose results are void changes nothing.
"""

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.api.request import ScheduledChunk, Sequence, SequenceState, StepPlan

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_TOO_HARD = "The answer's grammar cannot go on: {why}"
_FEW = 4  # rows that one thread masks


@dataclasses.dataclass(eq=False)
class GrammarState:
    """Place of one sequence in its grammar."""

    matcher: "LLMatcher"
    num_seen: int = 0  # output tokens that the matcher has consumed


# Sequences, each with its row in the step.
type BoundRows = SequenceOf[tuple[Sequence, int]]


def is_bound(plan: StepPlan) -> bool:
    """Return whether a token that the step draws is bound by a grammar."""
    return any(c.samples and c.sequence.request.grammar is not None for c in plan.chunks)


class RowMasks:
    """Fills masks; the engine's thread uses it."""

    def __init__(self, end_ids: SequenceOf[int]):
        """`end_ids` are the model's own end-of-sequence ids."""
        self._end_ids = tuple(end_ids)
        self._executor: LLExecutor | None = None

    @staticmethod
    def rows(plan: StepPlan) -> BoundRows:
        """Return the plan's rows that take a mask, asked while the sequences still have them."""
        return [(c.sequence, c.sequence.row) for c in plan.chunks if _takes_mask(c)]

    def fill(self, rows: BoundRows, words: Any, is_masked: Any) -> list[tuple[Sequence, str]]:
        """Write the masks of bound rows, numpy int32 [seqs, words] and int32 [seqs].

        Returns sequences that cannot go on, with the reason; their rows are not masked.
        """
        failed = [(sequence, why) for sequence, _ in rows if (why := _catch_up(sequence))]
        lost = {id(sequence) for sequence, _ in failed}
        bound = [(sequence, row) for sequence, row in rows if id(sequence) not in lost]
        self._compute(bound, words)
        for sequence, row in bound:
            matcher, mask = sequence.grammar_state.matcher, words[row]
            if matcher.is_error() or not mask.any():
                why = matcher.get_error() or "no token fits."
                failed.append((sequence, _TOO_HARD.format(why=why.splitlines()[0])))
                continue
            self._hold_back(sequence, mask)
            is_masked[row] = 1
        return failed

    def _compute(self, rows: BoundRows, words: np.ndarray) -> None:
        row_bytes = words.shape[1] * words.itemsize
        if len(rows) < _FEW:
            for sequence, row in rows:
                address = words[row].ctypes.data
                sequence.grammar_state.matcher.unsafe_compute_mask_ptr(address, row_bytes)
            return
        executor = self._executor = self._executor or _new_executor()
        matchers = [(sequence.grammar_state.matcher, row) for sequence, row in rows]
        address = words.ctypes.data
        executor.unsafe_compute_mask_ptr(matchers, address, row_bytes, words.shape[0])

    def _hold_back(self, sequence: Sequence, row: np.ndarray) -> None:
        """Take the ends out that ignore_eos and min_tokens ask for, unless nothing else is left."""
        sampling, ends = sequence.request.sampling, ()
        if len(sequence.output_ids) < sampling.min_tokens:
            ends = (*self._end_ids, *sampling.stop_token_ids)
        elif sampling.ignore_eos:
            ends = self._end_ids
        if not ends:
            return
        kept = row.view(np.uint32).copy()
        for token in ends:
            kept[token // 32] &= ~np.uint32(1 << token % 32)
        if kept.any():
            row.view(np.uint32)[:] = kept


def _new_executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()


def _takes_mask(chunk: ScheduledChunk) -> bool:
    """Return whether the chunk draws a token that counts: its sequence may have ended meanwhile."""
    sequence = chunk.sequence
    runs = sequence.state is SequenceState.RUNNING and not sequence.num_discarded
    return chunk.samples and runs and sequence.request.grammar is not None


def _catch_up(sequence: Sequence) -> str | None:
    """Feed the matcher the tokens it has not seen; return what is wrong with them."""
    state = sequence.grammar_state
    if state is None:
        state = sequence.grammar_state = GrammarState(sequence.request.grammar.start())
    new = sequence.token_ids[sequence.num_prompt + state.num_seen :]
    state.num_seen += len(new)
    if not new or state.matcher.consume_tokens(new):
        return None
    return _TOO_HARD.format(why=(state.matcher.get_error() or "a token").splitlines()[0])
