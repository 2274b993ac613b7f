"""The masks of one step's rows: which tokens each bound sequence may take next. No jax.

The engine's thread asks once the tokens of the step before are known, and while the forward part of
the step runs. Tokens are fed to a matcher when they are in the sequence, so a preempted sequence
keeps its place, and a step whose results are void changes nothing.
"""

import collections
import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from serving.api.request import Failure, Sequence, SequenceState, StepPlan
from serving.api.sampling import Sampling

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)

_TOO_HARD = "The answer's grammar cannot go on: {why}"
_PAST_LIMITS = ("too many", "; max is")  # in an error of llguidance: the grammar is the cause
_FEW = 4  # rows that one thread masks
THREADS = 4  # at most beside a step that the CPU computes: threads without work look for some
# At most beside a device: near a string's greatest length a row takes 3 ms, others 0.1. Of 64 bound
# rows some are there in most steps, and their masks have to be done before the step's logits.
THREADS_BESIDE_DEVICE = 12
_BITS = 32
_SAMPLED = 16  # one word of so many is counted
_SOME, _NEARLY_ALL = 0.05, 0.99  # of the tokens


@dataclasses.dataclass(eq=False)
class GrammarState:
    """Place of one sequence in its grammar."""

    matcher: "LLMatcher"
    num_read: int  # of the sequence's tokens: its prompt, and what the matcher has consumed
    holds_ends: bool  # by ignore_eos, whatever the answer's length
    counts: bool  # by min_tokens, up to that length
    effort: int = 0  # that its next mask may take: 2 is much


# A sequence, its state, the logit row that takes its first mask, that mask, the tokens that the
# matcher has not consumed, and the drafts, each of which is followed by a mask too. A plain tuple:
# another object takes as long to make as a mask's tenth.
BoundRow = tuple[Sequence, GrammarState, int, int, list[int], tuple[int, ...]]


@dataclasses.dataclass(eq=False)
class Filling:
    """Masks that are being written, and sequences that cannot go on, with the reason."""

    words: np.ndarray
    rows: list[BoundRow] = dataclasses.field(default_factory=list)
    held: list[int] = dataclasses.field(default_factory=list)  # masks without the model's ends
    counted: list[BoundRow] = dataclasses.field(default_factory=list)  # rows with min_tokens
    failed: list[Failure] = dataclasses.field(default_factory=list)
    num_masks: int = 0
    job: Future[None] | None = None


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

    @property
    def on_few_cores(self) -> bool:
        """True if the caller fills all masks, as no core is free for another thread."""
        return self._num_threads <= 1

    def start(self, plan: StepPlan, first_rows: SequenceOf[int], words: np.ndarray) -> Filling:
        """Begin to write the masks of the plan's bound rows, numpy int32 [masks, words].

        `first_rows` has the first sample of each chunk. Many rows are the work of other threads,
        and the caller may plan meanwhile.
        """
        filling = _filling(plan, first_rows, words)
        if len(filling.rows) < self._few:
            self._fill(filling)
        else:
            filling.job = self._in_thread(lambda: self._fill(filling))
        return filling

    def finish(self, filling: Filling, row_to_mask: np.ndarray) -> list[Failure]:
        """Wait for the masks and write which logit row has which.

        Returns sequences that cannot go on, with the reason; their rows are not masked. After a
        draft that its mask does not allow no row is masked, as none of them will count.
        """
        if filling.job is not None:
            filling.job.result()
        self._assign(filling, row_to_mask)
        return filling.failed

    def post(
        self,
        plan: StepPlan,
        first_rows: SequenceOf[int],
        words: np.ndarray,
        row_to_mask: np.ndarray,
        told: Callable[[], None],
    ) -> list[Failure]:
        """Begin what `start` and `finish` do; `told` is called at the end, by any thread.

        The list that is returned has its sequences by then.
        """
        filling = _filling(plan, first_rows, words)

        def work() -> None:
            self._fill(filling, row_to_mask)
            told()

        if len(filling.rows) < self._few:
            work()
        else:
            self._posted = self._in_thread(work)
        return filling.failed

    def settle(self) -> None:
        """Return when nobody writes to the memory that was given to `post`.

        A step that went on without its masks has ended before they are made.
        """
        posted, self._posted = self._posted, None
        if posted is not None:
            posted.result()

    def close(self) -> None:
        """End the thread, if it runs."""
        if self._worker is not None:
            self._worker.shutdown(wait=False)

    def _in_thread(self, work: Callable[[], None]) -> Future[None]:
        self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="masks")
        return self._worker.submit(work)

    def _fill(self, filling: Filling, row_to_mask: np.ndarray | None = None) -> None:
        """Write the masks, and which logit row has which if that is given; never raises."""
        try:
            if len(filling.rows) < self._few:
                self._fill_here(filling)
            else:
                self._fill_by_threads(filling)
            self._hold_back(filling)
            if row_to_mask is not None:
                self._assign(filling, row_to_mask)
        except Exception as error:
            logger.exception("Masks could not be made.")
            why = _TOO_HARD.format(why=error)
            filling.failed += [Failure(sequence, why) for sequence, *_ in filling.rows]
            filling.rows = []  # finish has none to assign

    def _fill_here(self, filling: Filling) -> None:
        """Fill the masks row by row: beside a step on few cores no other thread is free."""
        words, drafted = filling.words, []
        address, size = words.ctypes.data, words.shape[1] * words.itemsize
        for row in filling.rows:
            _, state, _, place, new, drafts = row
            if new and not state.matcher.consume_tokens(new):
                continue  # the matcher has an error now
            if drafts:
                drafted.append(row)
            else:
                state.matcher.unsafe_compute_mask_ptr(address + place * size, size)
        self._fill_drafted(drafted, words)

    def _fill_by_threads(self, filling: Filling) -> None:
        behind = [(state.matcher, new) for _, state, _, _, new, _ in filling.rows if new]
        if any(len(new) > 1 for _, new in behind):
            for matcher, new in behind:
                matcher.consume_tokens(new)
        elif behind:  # one new token each, as in most steps
            self._threads().consume_token_par([(matcher, token) for matcher, (token,) in behind])
        alone, drafted, words = [], [], filling.words
        for row in _dealt(filling.rows, self._num_threads):
            _, state, _, place, _, drafts = row
            if state.matcher.is_error():
                continue
            if drafts:
                drafted.append(row)
            else:
                alone.append((state.matcher, place))
        if alone:
            size = words.shape[1] * words.itemsize
            self._threads().unsafe_compute_mask_ptr(alone, words.ctypes.data, size, words.shape[0])
        self._fill_drafted(drafted, words)
        _guess_efforts(filling.rows, words[: filling.num_masks])

    def _fill_drafted(self, rows: SequenceOf[BoundRow], words: np.ndarray) -> None:
        if not rows:
            return
        asked = []
        for _, state, _, place, _, drafts in rows:
            words[place : place + 1 + len(drafts)] = 0  # not all of them may be reached
            # A copy: the library takes the drafts back, which not every grammar survives.
            asked.append((state.matcher.deep_copy(), place, list(drafts)))
        where = words.ctypes.data, words.shape[1] * words.itemsize, words.shape[0]
        self._threads().unsafe_compute_mask_ptr_with_draft_token(asked, *where)
        for row, (copy, *_) in zip(rows, asked, strict=True):
            if copy.is_error():
                _fill_one_by_one(row, words)

    def _threads(self) -> "LLExecutor":
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, self._num_threads))
        return self._executor

    def _assign(self, filling: Filling, row_to_mask: np.ndarray) -> None:
        """Write which logit row has which mask; where no token fits, the matcher has an error."""
        for sequence, state, first, place, _, drafts in filling.rows:
            if state.matcher.is_error():
                filling.failed.append(_failure(sequence, state.matcher))
            elif drafts:
                for ahead in range(1 + _num_allowed(drafts, filling.words[place:])):
                    row_to_mask[first + ahead] = place + ahead
            else:
                row_to_mask[first] = place

    def _hold_back(self, filling: Filling) -> None:
        """Take the ends out that ignore_eos and min_tokens ask for, unless nothing else is left."""
        by_ends = collections.defaultdict[tuple[int, ...], list[int]](list)
        if filling.held:
            by_ends[self._end_ids] += filling.held
        for sequence, _, _, place, _, drafts in filling.counted:
            sampling = sequence.request.sampling
            length = len(sequence.token_ids) - sequence.num_prompt
            for ahead in range(1 + len(drafts)):
                by_ends[self._held_ends(sampling, length + ahead)].append(place + ahead)
        by_ends.pop((), None)
        bits = filling.words.view(np.uint32)
        for ends, places in by_ends.items():
            columns, held = _held_words(ends)
            if not (bits[: filling.num_masks, columns] & ~held).any():
                continue  # no mask has an end, as in the middle of most answers
            rows = np.array(places)[:, None]
            before = bits[rows, columns]
            bits[rows, columns] = before & held
            empty = ~bits[rows[:, 0]].any(axis=1)
            bits[rows[empty], columns] = before[empty]

    def _held_ends(self, sampling: Sampling, length: int) -> tuple[int, ...]:
        """Return the tokens that may not end an answer of this many tokens."""
        if length < sampling.min_tokens:
            return (*self._end_ids, *sampling.stop_token_ids)
        return self._end_ids if sampling.ignore_eos else ()


def _fill_one_by_one(row: BoundRow, words: np.ndarray) -> None:
    """Fill the masks of a row with drafts and take none back, as `max_tokens` and `stop` need it.

    A grammar that cannot go on leaves its error in the row's matcher.
    """
    _, state, _, place, _, drafts = row
    copy, size = state.matcher.deep_copy(), words.shape[1] * words.itemsize
    for ahead, draft in enumerate((*drafts, None)):
        mask = words[place + ahead]
        copy.unsafe_compute_mask_ptr(mask.ctypes.data, size)
        if copy.is_error():
            state.matcher = copy
        elif draft is not None and _num_allowed((draft,), mask[None]):
            copy.consume_token(draft)
            continue
        return


def _filling(plan: StepPlan, first_rows: SequenceOf[int], words: np.ndarray) -> Filling:
    """Return the plan's rows that take masks, without any yet.

    A grammar that cannot start fails its sequence alone.
    """
    filling, place = Filling(words), 0
    for chunk, first in zip(plan.chunks, first_rows, strict=True):
        sequence = chunk.sequence
        if sequence.request.grammar is None or not chunk.samples:
            continue
        if sequence.num_discarded or sequence.state is not SequenceState.RUNNING:
            continue  # what it draws does not count: it may have ended meanwhile
        state = sequence.grammar_state or _start(sequence, filling.failed)
        if state is None:
            continue
        # As if the matcher had consumed them: the sequence may get more before it does.
        new = sequence.token_ids[state.num_read :]
        state.num_read += len(new)
        row = (sequence, state, first, place, new, chunk.drafts)
        filling.rows.append(row)
        after = place + 1 + len(chunk.drafts)
        if state.counts:
            filling.counted.append(row)
        elif state.holds_ends:
            filling.held += range(place, after)
        place = after
    filling.num_masks = place
    return filling


def _start(sequence: Sequence, failed: list[Failure]) -> GrammarState | None:
    """Begin a sequence's grammar; None if that fails, with the reason in `failed`."""
    sampling = sequence.request.sampling
    try:
        matcher = sequence.request.grammar.start()
    except Exception as error:
        logger.exception("A grammar could not start.")
        failed.append(Failure(sequence, _TOO_HARD.format(why=error)))
        return None
    holds = sampling.ignore_eos, sampling.min_tokens > 0
    state = sequence.grammar_state = GrammarState(matcher, sequence.num_prompt, *holds)
    return state


@functools.lru_cache(maxsize=64)
def _held_words(ends: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the words of a mask that have these tokens, and their other bits, uint32."""
    kept = dict.fromkeys((token // _BITS for token in ends), (1 << _BITS) - 1)
    for token in ends:
        kept[token // _BITS] &= ~(1 << token % _BITS)
    return np.array(list(kept)), np.array(list(kept.values()), np.uint32)


def _guess_efforts(rows: SequenceOf[BoundRow], words: np.ndarray) -> None:
    """Note by its last mask what a row's next one may take.

    Within a string's last characters some tokens are too long, and each has to be tried: the last
    mask allowed many tokens, yet not all. Where it allowed all, the next one may be such a mask.
    """
    bits = np.bitwise_count(words.view(np.uint32)[:, ::_SAMPLED]).sum(axis=1, dtype=np.int64)
    shares = bits / (_BITS * -(-words.shape[1] // _SAMPLED))
    efforts = (shares > _SOME).astype(int) + ((shares > _SOME) & (shares < _NEARLY_ALL))
    for _, state, _, place, _, _ in rows:
        state.effort = int(efforts[place])


def _dealt(rows: SequenceOf[BoundRow], num_threads: int) -> SequenceOf[BoundRow]:
    """Return the rows in an order by which threads end at about the same time.

    The library's threads halve the list until each has two pieces; rows that may take long begin
    pieces of their own.
    """
    by_effort = sorted(rows, key=lambda row: -row[1].effort)
    num_pieces = 1 << num_threads.bit_length()
    return [row for piece in range(num_pieces) for row in by_effort[piece::num_pieces]]


def _num_allowed(drafts: SequenceOf[int], masks: np.ndarray) -> int:
    """Return how many drafts, from the first on, the masks before them allow."""
    for index, token in enumerate(drafts):
        if not masks[index].view(np.uint32)[token // _BITS] >> np.uint32(token % _BITS) & 1:
            return index
    return len(drafts)


def _failure(sequence: Sequence, matcher: "LLMatcher") -> Failure:
    """Return the failure of a sequence whose matcher has an error."""
    why = matcher.get_error().splitlines()[0]
    is_past_limit = any(words in why for words in _PAST_LIMITS)
    return Failure(sequence, _TOO_HARD.format(why=why), bad_request=is_past_limit)
