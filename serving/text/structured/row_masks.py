"""The masks of one step's rows: which tokens each bound sequence may take next. No jax.

The engine's thread asks once the tokens of the step before are known, and while the forward part of
the step runs. Tokens are fed to a matcher when they are in the sequence, so a preempted sequence
keeps its place, and a step whose results are void changes nothing.
"""

import collections
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from serving.api.request import ScheduledChunk, Sequence, SequenceState, StepPlan
from serving.api.sampling import Sampling

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)

_TOO_HARD = "The answer's grammar cannot go on: {why}"
_FEW = 4  # rows that one thread masks
THREADS = 4  # at most beside a step that the CPU computes: threads without work look for some
# At most beside a device: near a string's greatest length a row takes 3 ms, others 0.1. Of 64 bound
# rows some are there in most steps, and their masks have to be done before the step's logits.
THREADS_BESIDE_DEVICE = 12
_BITS = 32
_SAMPLED = 16  # one word of so many is counted
_SOME, _NEARLY_ALL = 0.05, 0.99  # of the tokens
_BYTES_WORDS = 32  # of a mask, in which most vocabularies have the tokens of single bytes


@dataclasses.dataclass(eq=False)
class GrammarState:
    """Place of one sequence in its grammar."""

    matcher: "LLMatcher"
    num_seen: int = 0  # output tokens that the matcher has consumed
    effort: int = 0  # that its next mask may take: 2 is much


class BoundRow(NamedTuple):
    """A sequence that takes a mask in its logit row `first`, and one after each of its drafts."""

    sequence: Sequence
    first: int
    drafts: tuple[int, ...] = ()


class RowMasks:
    """Fills masks; the engine's thread uses it."""

    def __init__(self, end_ids: SequenceOf[int], most_threads: int = THREADS):
        """`end_ids` are the model's own end-of-sequence ids.

        `most_threads` fill masks, or four fifths of this process's cores if those are fewer.
        """
        self._end_ids = tuple(end_ids)
        self._executor: LLExecutor | None = None
        self._num_threads = min(most_threads, len(os.sched_getaffinity(0)) * 4 // 5)
        self._few = _FEW if self._num_threads > 1 else 1 << 30  # fewer rows are the caller's work
        self._worker: ThreadPoolExecutor | None = None
        self._posted: Future[None] | None = None  # what `post` gave to the worker last

    @staticmethod
    def rows(plan: StepPlan, first_rows: SequenceOf[int]) -> list[BoundRow]:
        """Return the plan's rows that take masks; `first_rows` has the first sample of each chunk.

        To be asked before the next plan, which may end sequences.
        """
        chunks = zip(plan.chunks, first_rows, strict=True)
        return [BoundRow(c.sequence, first, c.drafts) for c, first in chunks if _takes_mask(c)]

    def start(self, rows: SequenceOf[BoundRow], words: np.ndarray) -> "Filling":
        """Begin to write the masks of bound rows, numpy int32 [masks, words].

        Many rows are the work of other threads, and the caller may plan meanwhile.
        """
        behind = [(row.sequence, _unseen(row.sequence)) for row in rows]
        filling = self._filling(rows, words)
        if len(rows) < self._few:
            self._work(filling, behind)
        else:
            filling.job = self._in_thread(lambda: self._work(filling, behind))
        return filling

    def finish(self, filling: "Filling", row_to_mask: np.ndarray) -> list[tuple[Sequence, str]]:
        """Wait for the masks and write which logit row has which.

        Returns sequences that cannot go on, with the reason; their rows are not masked. After a
        draft that its mask does not allow no row is masked, as none of them will count.
        """
        if filling.job is not None:
            filling.job.result()
        return self._assign(filling, row_to_mask)

    def post(
        self,
        rows: SequenceOf[BoundRow],
        words: np.ndarray,
        row_to_mask: np.ndarray,
        told: Callable[[], None],
    ) -> list[tuple[Sequence, str]]:
        """Begin what `start` and `finish` do; `told` is called at the end, by any thread.

        The list that is returned has its sequences by then.
        """
        behind = [(row.sequence, _unseen(row.sequence)) for row in rows]
        filling, failed = self._filling(rows, words), []

        def work() -> None:
            try:
                self._work(filling, behind)
                failed.extend(self._assign(filling, row_to_mask))
            except Exception as error:
                logger.exception("Masks could not be made.")
                failed.extend((row.sequence, _TOO_HARD.format(why=error)) for row in rows)
            finally:
                told()

        if len(rows) < self._few:
            work()
        else:
            self._posted = self._in_thread(work)
        return failed

    def settle(self) -> None:
        """Return when nobody writes to the memory that was given to `post`.

        A step that went on without its masks has ended before they are made.
        """
        posted, self._posted = self._posted, None
        if posted is not None:
            posted.result()

    def _assign(self, filling: "Filling", row_to_mask: np.ndarray) -> list[tuple[Sequence, str]]:
        self._hold_back(filling)
        words, lost, failed = filling.words, filling.lost, []
        fits = _any_bit(words[: filling.places[-1]]).tolist()
        for row, place in zip(filling.rows, filling.places, strict=False):
            matcher = row.sequence.grammar_state.matcher
            if lost and id(row.sequence) in lost:
                failed.append((row.sequence, _why(matcher, "a token")))
            elif matcher.is_error() or not fits[place]:
                failed.append((row.sequence, _why(matcher, "no token fits.")))
            elif row.drafts:
                for ahead in range(1 + _num_allowed(row.drafts, words[place:])):
                    row_to_mask[row.first + ahead] = place + ahead
            else:
                row_to_mask[row.first] = place
        return failed

    def close(self) -> None:
        """End the thread, if it runs."""
        if self._worker is not None:
            self._worker.shutdown(wait=False)

    @staticmethod
    def _filling(rows: SequenceOf[BoundRow], words: np.ndarray) -> "Filling":
        counts = (1 + len(row.drafts) for row in rows)
        return Filling(rows, list(itertools.accumulate(counts, initial=0)), words)

    def _in_thread(self, work: Callable[[], None]) -> Future[None]:
        self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="masks")
        return self._worker.submit(work)

    def _work(self, filling: "Filling", behind: SequenceOf[tuple[Sequence, list[int]]]) -> None:
        filling.lost = self._catch_up(behind)
        self._compute(filling)

    def _catch_up(self, behind: SequenceOf[tuple[Sequence, list[int]]]) -> set[int]:
        """Feed matchers the tokens they have not seen; return whose took one that does not fit."""
        new_of = [(s, s.grammar_state.matcher, new) for s, new in behind if new]
        if len(new_of) < self._few or any(len(new) > 1 for *_, new in new_of):
            return {id(s) for s, matcher, new in new_of if not matcher.consume_tokens(new)}
        # Each has one new token, as in most steps.
        done = self._threads().consume_token_par([(matcher, new[0]) for _, matcher, new in new_of])
        return {id(s) for (s, *_), is_done in zip(new_of, done, strict=True) if not is_done}

    def _compute(self, filling: "Filling") -> None:
        words, lost = filling.words, filling.lost
        alone, drafted, size = [], [], words.shape[1] * words.itemsize
        rows = list(zip(filling.rows, filling.places, strict=False))
        shared = len(rows) >= self._few
        for row, place in _dealt(rows, self._num_threads) if shared else rows:
            if lost and id(row.sequence) in lost:
                continue
            matcher = row.sequence.grammar_state.matcher
            if row.drafts:
                words[place : place + 1 + len(row.drafts)] = 0  # not all of them may be reached
                drafted.append((matcher, place, list(row.drafts)))
            else:
                alone.append((matcher, place))
        address = words.ctypes.data
        where = address, size, words.shape[0]
        if len(alone) >= self._few:
            self._threads().unsafe_compute_mask_ptr(alone, *where)
        else:
            for matcher, place in alone:
                matcher.unsafe_compute_mask_ptr(address + place * size, size)
        if drafted:
            self._threads().unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        if shared:
            _guess_efforts(rows, words[: filling.places[-1]])

    def _threads(self) -> "LLExecutor":
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, self._num_threads))
        return self._executor

    def _hold_back(self, filling: "Filling") -> None:
        """Take the ends out that ignore_eos and min_tokens ask for, unless nothing else is left."""
        by_ends = collections.defaultdict[tuple[int, ...], list[int]](list)
        for row, place in zip(filling.rows, filling.places, strict=False):
            sampling = row.sequence.request.sampling
            if sampling.min_tokens:
                length = len(row.sequence.token_ids) - row.sequence.num_prompt
                for ahead in range(1 + len(row.drafts)):
                    by_ends[self._held_ends(sampling, length + ahead)].append(place + ahead)
            elif sampling.ignore_eos:
                by_ends[self._end_ids] += range(place, place + 1 + len(row.drafts))
        by_ends.pop((), None)
        bits = filling.words.view(np.uint32)
        for ends, rows in by_ends.items():
            kept = dict.fromkeys((token // _BITS for token in ends), (1 << _BITS) - 1)
            for token in ends:
                kept[token // _BITS] &= ~(1 << token % _BITS)
            columns, held = list(kept), np.array(list(kept.values()), np.uint32)
            before = bits[np.ix_(rows, columns)]
            changed = np.flatnonzero((before & ~held).any(axis=1))
            if not len(changed):  # as in the middle of most answers
                continue
            before, rows = before[changed], [rows[place] for place in changed]
            bits[np.ix_(rows, columns)] = before & held
            empty = np.flatnonzero(~_any_bit(bits[rows]))
            bits[np.ix_([rows[place] for place in empty], columns)] = before[empty]

    def _held_ends(self, sampling: Sampling, length: int) -> tuple[int, ...]:
        """Return the tokens that may not end an answer of this many tokens."""
        if length < sampling.min_tokens:
            return (*self._end_ids, *sampling.stop_token_ids)
        return self._end_ids if sampling.ignore_eos else ()


@dataclasses.dataclass(eq=False)
class Filling:
    """Masks that are being written."""

    rows: SequenceOf[BoundRow]
    places: SequenceOf[int]  # the first mask of each row, and their number
    words: np.ndarray
    lost: set[int] = dataclasses.field(default_factory=set)  # ids of sequences with a wrong token
    job: Future[None] | None = None


def _takes_mask(chunk: ScheduledChunk) -> bool:
    """Return whether the chunk draws a token that counts: its sequence may have ended meanwhile."""
    sequence = chunk.sequence
    runs = sequence.state is SequenceState.RUNNING and not sequence.num_discarded
    return chunk.samples and runs and sequence.request.grammar is not None


def _unseen(sequence: Sequence) -> list[int]:
    """Return the output tokens that the sequence's matcher has not consumed, as if it had."""
    state = sequence.grammar_state
    if state is None:
        state = sequence.grammar_state = GrammarState(sequence.request.grammar.start())
    new = sequence.token_ids[sequence.num_prompt + state.num_seen :]
    state.num_seen += len(new)
    return new


def _guess_efforts(rows: SequenceOf[tuple[BoundRow, int]], words: np.ndarray) -> None:
    """Note by its last mask what a row's next one may take.

    Within a string's last characters some tokens are too long, and each has to be tried: the last
    mask allowed many tokens, yet not all. Where it allowed all, the next one may be such a mask.
    """
    bits = np.bitwise_count(words.view(np.uint32)[:, ::_SAMPLED]).sum(axis=1, dtype=np.int64)
    shares = bits / (_BITS * -(-words.shape[1] // _SAMPLED))
    efforts = (shares > _SOME).astype(int) + ((shares > _SOME) & (shares < _NEARLY_ALL))
    for row, place in rows:
        row.sequence.grammar_state.effort = int(efforts[place])


def _dealt(
    rows: SequenceOf[tuple[BoundRow, int]], num_threads: int
) -> SequenceOf[tuple[BoundRow, int]]:
    """Return the rows in an order by which threads end at about the same time.

    The library's threads halve the list until each has two pieces; rows that may take long begin
    pieces of their own.
    """
    by_effort = sorted(rows, key=lambda one: -one[0].sequence.grammar_state.effort)
    num_pieces = 1 << num_threads.bit_length()
    return [one for piece in range(num_pieces) for one in by_effort[piece::num_pieces]]


def _any_bit(words: np.ndarray) -> np.ndarray:
    """Return whether each row of words has a bit; nearly all have one among single bytes."""
    found = words[:, :_BYTES_WORDS].any(axis=1)
    rest = np.flatnonzero(~found)
    found[rest] = words[rest].any(axis=1)
    return found


def _num_allowed(drafts: SequenceOf[int], masks: np.ndarray) -> int:
    """Return how many drafts, from the first on, the masks before them allow."""
    for index, token in enumerate(drafts):
        if not masks[index].view(np.uint32)[token // _BITS] >> np.uint32(token % _BITS) & 1:
            return index
    return len(drafts)


def _why(matcher: "LLMatcher", otherwise: str) -> str:
    return _TOO_HARD.format(why=(matcher.get_error() or otherwise).splitlines()[0])
