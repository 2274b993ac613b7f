"""Speculation: guesses of the next tokens of decoding sequences, and whether they pay. No jax.

A draft is what followed the longest repetition of a sequence's last tokens. The step draws a token
after each guess as it would without, by the same seed and position; a guess counts when it is what
was drawn before it. So drafts change how many steps an answer takes, and nothing else.

Guesses are compared with the tokens that come, which costs no step. Drafts are sent where these
guesses were right lately, and where steps with drafts have given more tokens a second than steps
without, as measured: by the usual times of both, and by the sum of what drafts won and cost. While
these cost more, nothing is guessed. The step after one with drafts is planned when its results are
known, so it starts later; this is part of what is measured.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from serving.api.request import ScheduledChunk, Sequence, SequenceResult, StepPlan
from serving.api.speculative_config import SpeculativeConfig
from serving.scheduling.fair_share import FairShares
from serving.scheduling.repetitions import Repetitions
from serving.scheduling.sequence_pages import SequencePages
from serving.scheduling.step_budget import StepBudget

_CATCH_UP = 2048  # tokens that are indexed in one plan
_TOGETHER = 4  # tokens of an idle sequence that are indexed in one go, for 0.6 of the time
_FIRST_TRUST = 0.4  # share of right guesses of a sequence that has made none
_NEWEST = 0.25  # weight of the newest guess in that share
_LEAST_CHANCE = 0.35  # of a guess and all before it to be right
_LATELY = 8  # steps of a kind whose times are remembered
_FEW = 3  # steps of a kind before their times count
_MARGIN = 1.1  # by which a step with drafts must be better
_MEASURE_DRAFTED = 256  # decisions against drafts after which steps with drafts are tried again
_LONGEST = 8192  # what this number may grow to, twofold each time that drafts do not pay
_KEPT = 0.9  # of the guesses expected and right so far, with each step that has drafts
_TRIED = 6  # steps with drafts after which what they won and cost counts
_REMEMBERED = 0.95  # of what they won and cost, with each one
_MEASURE_PLAIN = 192  # decisions for drafts after which steps without are measured again


@dataclasses.dataclass(eq=False)
class DraftState:
    """Repetitions of one sequence, and the share of its guesses that were right lately.

    An idle one has no guess worth sending; then several tokens are indexed in one go.
    """

    repetitions: Repetitions
    trust: float = _FIRST_TRUST
    is_idle: bool = False
    due: int = 0  # tokens of the sequence from which on new ones are to be indexed

    def follow(self, token_ids: SequenceOf[int], most: int) -> int:
        """Index up to `most` new tokens, each compared with its guess; return how many.

        Where guesses were right lately, the next token is due at once.
        """
        repetitions = self.repetitions
        start = repetitions.num_known
        end = min(len(token_ids), start + most)
        for is_right in repetitions.extend(end):
            self.trust += _NEWEST * (is_right - self.trust)
        guesses = self.trust > _FIRST_TRUST or repetitions.next_token is not None
        self.is_idle = self.trust < _LEAST_CHANCE or not guesses
        self.due = end + (_TOGETHER if self.is_idle and end == len(token_ids) else 1)
        return end - start

    def length(self, most: int) -> int:
        """Return how many guesses are likely enough, `most` at most."""
        count, chance = 0, self.trust
        while count < most and chance >= _LEAST_CHANCE:
            count, chance = count + 1, chance * self.trust
        return count

    def expected(self, first: int, count: int) -> float:
        """Return how many of `count` guesses, after `first` others, will be right on average."""
        return sum(self.trust**position for position in range(first + 1, first + count + 1))


class DraftTimes:
    """Seconds of decode steps lately, with and without drafts; decides whether drafts pay."""

    def __init__(self) -> None:
        self._times: dict[tuple[bool, int], collections.deque[float]] = {}
        self._drafted: collections.deque[float] | None = (
            None  # where the step before is, if drafted
        )
        self._decided = {True: 0, False: 0}  # for and against drafts, since either was forgotten
        self._measure_drafted = _MEASURE_DRAFTED
        self._expected = self._right = 0.0  # guesses of steps with drafts lately
        self._tried = 0  # steps with drafts since they were given up
        self._won = self._cost = 0.0  # seconds: plain steps that theirs replaced, and their surplus

    def add(self, *, drafts: bool, rows: int, num_tokens: int, right: int, seconds: float) -> None:
        """Remember a step, given in the order of steps, from the results of the one before.

        `right` guesses of it, of `rows` sequences, were right. A plain step after one with drafts
        began late: what it took longer is the cost of the other.
        """
        key = (drafts, num_tokens.bit_length())
        times = self._times.setdefault(key, collections.deque(maxlen=_LATELY))
        drafted, self._drafted = self._drafted, times if drafts else None
        if drafts:
            self._weigh(seconds, rows, right)
        if drafts or drafted is None:
            times.append(seconds)
        elif times:
            late = max(0.0, seconds - statistics.median(times))
            drafted[-1] += late
            self._cost += late

    def _weigh(self, seconds: float, rows: int, right: int) -> None:
        """Put what a step with drafts won beside what it took longer than a plain one."""
        if plain := self._times.get((False, rows.bit_length())):
            usual = statistics.median(plain)
            self._tried += 1
            self._won = _REMEMBERED * self._won + usual * right / rows
            self._cost = _REMEMBERED * self._cost + seconds - usual

    def pays(self, rows: int, num_drafts: int, expected: float) -> bool:
        """Return whether a step of `rows` tokens does better with `num_drafts` drafts.

        `expected` of them will be right. Steps without drafts are measured first, then those with.
        """
        plain = self._times.get((False, rows.bit_length()), ())
        drafted = self._times.get((True, (rows + num_drafts).bit_length()), ())
        if len(plain) < _FEW:
            return False
        is_measured = len(drafted) >= _FEW
        ratio = statistics.median(drafted) / statistics.median(plain) if is_measured else 1.0
        # Guesses are sent where they were right lately: on average fewer will be than that says.
        share = min(1.0, (self._right + 1.0) / (self._expected + 1.0))
        paid = not self._lose and (rows + share * expected) / rows >= _MARGIN * ratio
        self._decide(paid)
        return paid

    def rest(self) -> bool:
        """Return whether drafts are not to be looked for, as those of late cost more than they won.

        This is a decision against drafts.
        """
        loses = self._lose
        if loses:
            self._decide(False)
        return loses

    @property
    def _lose(self) -> bool:
        return self._tried >= _TRIED and self._won < _MARGIN * self._cost

    def _decide(self, paid: bool) -> None:
        self._decided[paid] += 1
        if self._decided[paid] >= (_MEASURE_PLAIN if paid else self._measure_drafted):
            self._forget(paid)

    def judge(self, expected: float, right: int) -> None:
        """Remember how many guesses of a step were right, beside how many were expected to be."""
        self._expected = _KEPT * self._expected + expected
        self._right = _KEPT * self._right + right

    def _forget(self, paid: bool) -> None:
        """Forget what was not chosen for long, as it may have changed; drafts later each time."""
        longer = _MEASURE_DRAFTED if paid else min(2 * self._measure_drafted, _LONGEST)
        self._measure_drafted, self._decided[paid] = longer, 0
        self._times = {key: times for key, times in self._times.items() if key[0] == paid}
        if not paid:
            self._expected = self._right = self._won = self._cost = 0.0
            self._tried = 0


@dataclasses.dataclass(frozen=True)
class DraftStats:
    """Counts from the start; a draft is the guesses of one sequence in one step."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    accepted_per_place: tuple[int, ...] = ()


class Speculation:
    """Adds drafts to steps, and takes in what came of them; the engine's thread uses it."""

    def __init__(self, config: SpeculativeConfig, times: DraftTimes | None = None):
        self._config, self._times = config, times or DraftTimes()
        self._drafts = self._tokens = 0
        self._accepted = [0] * config.num_speculative_tokens  # by place in the draft
        self._completed_s: float | None = None  # when the last step's results came
        self._expected = 0.0  # right guesses of the step with drafts that runs
        self._catch_up = _CATCH_UP  # tokens that the plan may still index

    @property
    def stats(self) -> DraftStats:
        accepted = tuple(self._accepted)
        return DraftStats(self._drafts, self._tokens, sum(accepted), accepted)

    def extend(self, step: StepBudget, pages: SequencePages, num_running: int) -> None:
        """Give sequences of a step in which all decode their drafts, if they pay.

        A step that is full, short, or begins or continues a prompt stays as it is. Drafts of rows
        that a grammar binds take a token mask each, of which a step has as many as one row may use.
        """
        chunks = step.chunks
        if not chunks:
            self._completed_s = None
        if step.is_short or not _all_decode(chunks):
            return
        room = min(step.tokens, step.logit_rows)
        if not room or self._times.rest():
            return
        drafts, expected = [], {}
        masks, self._catch_up = self._config.num_speculative_tokens, _CATCH_UP
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            unknown = chunk.start + 1 - len(sequence.token_ids)
            is_bound = sequence.request.grammar is not None
            draft = self._draft(sequence, unknown, min(room, masks) if is_bound else room)
            if draft:
                drafts.append((index, draft))
                expected[index] = self._state_of(sequence).expected(unknown, len(draft))
                room -= len(draft)
                masks -= len(draft) if is_bound else 0
        if not drafts:
            return
        num_drafts = sum(len(draft) for _, draft in drafts)
        total = sum(expected.values())
        if not self._times.pays(len(chunks), num_drafts, total):
            return
        self._expected = 0.0
        for index, draft in drafts:
            if self._grow(chunks[index].sequence, len(draft), pages, num_running):
                step.add_drafts(index, draft)
                self._expected += expected[index]

    def complete(
        self, plan: StepPlan, results: Iterable[SequenceResult], fair: FairShares, now: float
    ) -> None:
        """Take back what wrong guesses of the step got ahead of, and measure the step.

        Tenants are charged for tokens of drafts as for others.
        """
        right, has_drafts = 0, plan.has_drafts
        if has_drafts:
            for result in results:
                if result.chunk.drafts:
                    self._take_back(result)
                    right += len(result.more)
                    fair.charge(result.chunk.sequence.tenant, len(result.more))
            self._times.judge(self._expected, right)
        before, self._completed_s = self._completed_s, now
        if before is not None and _all_decode(plan.chunks):
            size = {"num_tokens": plan.num_tokens, "rows": len(plan.chunks)}
            self._times.add(drafts=has_drafts, **size, right=right, seconds=now - before)

    def _take_back(self, result: SequenceResult) -> None:
        chunk, right = result.chunk, len(result.more)
        wrong = len(chunk.drafts) - right
        chunk.sequence.num_computed -= wrong
        chunk.sequence.num_scheduled_outputs -= wrong
        self._drafts += 1
        self._tokens += len(chunk.drafts)
        for position in range(right):
            self._accepted[position] += 1

    def _state_of(self, sequence: Sequence) -> DraftState:
        if sequence.draft_state is None:
            config = self._config
            lookup = config.prompt_lookup_min, config.prompt_lookup_max
            sequence.draft_state = DraftState(Repetitions(sequence.token_ids, *lookup))
        return sequence.draft_state

    def _draft(self, sequence: Sequence, unknown: int, room: int) -> tuple[int, ...]:
        """Return a sequence's draft, after `unknown` tokens on their way from the device."""
        state, token_ids = self._state_of(sequence), sequence.token_ids
        if len(token_ids) >= state.due:
            self._catch_up -= state.follow(token_ids, self._catch_up)
        if state.is_idle or state.repetitions.num_known < len(token_ids):
            return ()
        left = sequence.max_outputs - sequence.num_scheduled_outputs
        count = state.length(min(self._config.num_speculative_tokens + unknown, left, room))
        return tuple(state.repetitions.following(count)[unknown:])

    @staticmethod
    def _grow(sequence: Sequence, count: int, pages: SequencePages, num_running: int) -> bool:
        """Hold pages for a draft, if every running sequence is left one to grow into."""
        is_room = pages.num_free > num_running + pages.num_pages(count)
        return is_room and pages.grow(sequence, count)


def _all_decode(chunks: Iterable[ScheduledChunk]) -> bool:
    """Return whether each chunk is one token and its drafts, of which one or more are drawn."""
    for chunk in chunks:  # no generator: it is asked twice a step
        if chunk.num_tokens != 1 + len(chunk.drafts) or not chunk.samples or chunk.prompt_logprobs:
            return False
    return True
