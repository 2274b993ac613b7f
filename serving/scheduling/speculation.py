"""Speculation: guesses of the next tokens of decoding sequences, and whether they pay. No jax.

A draft is what followed the longest repetition of a sequence's last tokens. The step draws a token
after each guess as it would without, by the same seed and position; a guess counts when it is what
was drawn before it. So drafts change how many steps an answer takes, and nothing else.

Guesses are compared with the tokens that come, which costs no step. Drafts are sent where these
guesses were right lately, as many as give the most tokens a second by the measured times of steps
of so many tokens. The sum of what drafts won and cost counts too: while they cost more, nothing is
guessed. The step after one with drafts is planned when its results are known, so it starts later;
this is part of what is measured. A look at a step's sequences costs 2 % of a short step: while none
of them has had a guess worth sending lately, every fourth step is looked at.
"""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from serving.api.request import ScheduledChunk, Sequence, SequenceResult, StepPlan
from serving.api.speculative_config import SpeculativeConfig
from serving.scheduling.draft_times import DraftTimes
from serving.scheduling.fair_share import FairShares
from serving.scheduling.pages.sequence_pages import SequencePages
from serving.scheduling.repetitions import Repetitions
from serving.scheduling.step_budget import StepBudget

_CATCH_UP = 2048  # tokens that are indexed in one plan
_TOGETHER = 4  # tokens of an idle sequence that are indexed in one go, for 0.6 of the time
_UNSEEN = _TOGETHER - 1  # steps that are not looked at after one whose sequences are all hopeless
_TOLD = 8  # guesses of a sequence after which their share tells something, or tokens without any
_FIRST_TRUST = 0.4  # share of right guesses of a sequence that has made none
_NEWEST = 0.1  # least weight of the newest guess in that share
_CHANCES = (0.35, 0.5, 0.65, 0.8, 0.9)  # least ones of a guess and all before it to be right
_LEAST_CHANCE = _CHANCES[0]


@dataclasses.dataclass(eq=False)
class DraftState:
    """Repetitions of one sequence, and the share of its guesses that were right lately.

    An idle one has no guess worth sending; then several tokens are indexed in one go.
    """

    repetitions: Repetitions
    trust: float = _FIRST_TRUST
    num_compared: int = 0
    is_idle: bool = False
    is_behind: bool = False  # some of its tokens are not indexed yet
    num_silent: int = 0  # tokens since the last guess
    due: int = 0  # tokens of the sequence from which on new ones are to be indexed

    def follow(self, token_ids: SequenceOf[int], most: int) -> int:
        """Index up to `most` new tokens, each compared with its guess; return how many.

        Where guesses were right lately, the next token is due at once.
        """
        repetitions = self.repetitions
        start = repetitions.num_known
        end = min(len(token_ids), start + most)
        for is_right in repetitions.extend(end):
            self.num_compared += 1
            self.trust += max(_NEWEST, 1 / (self.num_compared + 1)) * (is_right - self.trust)
        self.is_behind = end < len(token_ids)
        is_silent = repetitions.next_token is None
        self.num_silent = self.num_silent + end - start if is_silent else 0
        guesses = self.trust > _FIRST_TRUST or not is_silent
        self.is_idle = self.trust < _LEAST_CHANCE or not guesses
        self.due = end + (_TOGETHER if self.is_idle and end == len(token_ids) else 1)
        return end - start

    def is_hopeless(self, first: int) -> bool:
        """Return whether no guess after `first` others is worth sending soon."""
        if self.is_behind:
            return False
        if self.is_idle or self.num_silent >= _TOLD:
            return True
        return self.num_compared >= _TOLD and self.trust ** (first + 1) < _LEAST_CHANCE

    def length(self, most: int, first: int = 0, least: float = _LEAST_CHANCE) -> int:
        """Return how many guesses after `first` others are right with a chance of `least`, `most`
        at most.
        """
        count, chance = 0, self.trust ** (first + 1)
        while count < most and chance >= least:
            count, chance = count + 1, chance * self.trust
        return count

    def expected(self, first: int, count: int) -> float:
        """Return how many of `count` guesses, after `first` others, will be right on average."""
        return sum(self.trust**position for position in range(first + 1, first + count + 1))


class _Draft(NamedTuple):
    """Guesses of one chunk of a step, after `unknown` tokens on their way from the device."""

    index: int
    tokens: tuple[int, ...]
    state: DraftState
    unknown: int

    def cut(self, least: float) -> tuple[int, tuple[int, ...], float]:
        """Return index, guesses with a chance of `least` to be right, and how many will be."""
        count = self.state.length(len(self.tokens), self.unknown, least)
        return self.index, self.tokens[:count], self.state.expected(self.unknown, count)


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
        self._unseen = 0  # steps to come that are not looked at: a look costs 2 % of a short step
        self._is_hopeless = False  # the step that was looked at last

    @property
    def stats(self) -> DraftStats:
        accepted = tuple(self._accepted)
        return DraftStats(self._drafts, self._tokens, sum(accepted), accepted)

    def pause(self) -> None:
        """Measure nothing from the last step to the next, which does not follow it at once."""
        self._completed_s = None
        self._times.interrupt()

    def extend(self, step: StepBudget, pages: SequencePages, num_running: int) -> None:
        """Give sequences of a step in which all decode their drafts, if they pay.

        A step that is full, short, or begins or continues a prompt stays as it is. Drafts of rows
        that a grammar binds take a token mask each, of which a step has as many as one row may use.
        """
        chunks = step.chunks
        if not chunks:
            self.pause()
        elif self._unseen:
            self._unseen -= 1
            return
        if not chunks or step.is_short or not _all_decode(chunks):
            return
        room = min(step.tokens, step.logit_rows)
        if not room or self._times.rest(len(chunks)):
            return
        self._expected = 0.0
        for index, draft, expected in self._chosen(self._drafts_of(chunks, room), len(chunks)):
            if self._grow(chunks[index].sequence, len(draft), pages, num_running):
                step.add_drafts(index, draft)
                self._expected += expected

    def _drafts_of(self, chunks: SequenceOf[ScheduledChunk], room: int) -> list[_Draft]:
        """Return the longest drafts that fit, of the chunks that have one."""
        drafts, is_hopeless = [], True
        masks, self._catch_up = self._config.num_speculative_tokens, _CATCH_UP
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            unknown = chunk.start + 1 - len(sequence.token_ids)
            is_bound = sequence.request.grammar is not None
            draft = self._draft(sequence, unknown, min(room, masks) if is_bound else room)
            if draft:
                drafts.append(_Draft(index, draft, self._state_of(sequence), unknown))
                room -= len(draft)
                masks -= len(draft) if is_bound else 0
                is_hopeless = False
            elif is_hopeless:
                is_hopeless = self._state_of(sequence).is_hopeless(unknown)
        self._is_hopeless, self._unseen = is_hopeless, _UNSEEN if is_hopeless else 0
        return drafts

    def _chosen(
        self, drafts: SequenceOf[_Draft], rows: int
    ) -> list[tuple[int, tuple[int, ...], float]]:
        """Return index, draft and right guesses expected, of drafts as long as it pays best."""
        if not drafts:
            return []
        choices: list[list[tuple[int, tuple[int, ...], float]]] = []
        for least in _CHANCES:
            choice = [draft.cut(least) for draft in drafts]
            choices.append([one for one in choice if one[1]])
            if not choices[-1]:
                del choices[-1]
                break
        if not choices:
            return []
        sums = [(sum(len(d) for _, d, _ in one), sum(e for *_, e in one)) for one in choices]
        best = self._times.best(rows, sums)
        return [] if best is None else choices[best]

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
        before, self._completed_s = self._completed_s, now
        if before is None or not _all_decode(plan.chunks):
            self._times.interrupt()
            return
        self._times.add(
            drafts=has_drafts,
            rows=len(plan.chunks),
            num_tokens=plan.num_tokens,
            right=right,
            seconds=now - before,
            expected=self._expected,
        )

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
        if len(token_ids) >= state.due or self._is_hopeless:  # then all are due together
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
