"""Drafts change how many steps an answer takes, and nothing else; they are sent where they pay."""

import functools
import itertools
import random
import types

import pytest
from support.doubles.fake_device import arithmetic, expected_tokens
from support.doubles.paying_drafts import Paying
from support.drivers.scheduler_driver import VOCAB, Driver, check_answer, limits, random_request

from serving.api.request import FinishReason
from serving.api.speculative_config import SpeculativeConfig
from serving.scheduling.draft_times import DraftTimes
from serving.scheduling.merge_modes import MergeModes
from serving.scheduling.merge_policy import MergeTarget
from serving.scheduling.repetitions import Repetitions
from serving.scheduling.speculation import DraftState, Speculation

CONFIG = SpeculativeConfig(4, 1, 3)


SURE = types.SimpleNamespace(
    length=lambda most, first, least: most,
    expected=lambda first, count: float(count),
    is_hopeless=lambda first: False,
)


class Knowing(Speculation):
    """Guesses that are right as often as a coin says: random answers hardly repeat themselves."""

    def __init__(self, rng):
        super().__init__(CONFIG, Paying())
        self.rng = rng

    def _state_of(self, sequence):
        return SURE

    def _draft(self, sequence, unknown, room):
        left = sequence.max_outputs - sequence.num_scheduled_outputs
        count = min(self.rng.randrange(5), left, room)
        request = sequence.request
        adapter = arithmetic(request.adapter_digest, sequence.weights)
        tokens = expected_tokens(
            request.prompt_ids, adapter, sequence.seed, sequence.max_outputs, VOCAB
        )
        first = sequence.num_computed - sequence.num_prompt
        guesses = tokens[first : first + count]
        return tuple(t if self.rng.random() < 0.7 else self.rng.randrange(VOCAB) for t in guesses)


SHAPES = {
    "roomy": {"num_pages": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24},
    "few pages": {"num_pages": 13},
    "no cache": {"num_pages": 13, "enable_prefix_caching": False},
    "small steps": {"max_num_batched_tokens": 4, "max_logit_rows": 4},
    "merged weights": {"num_pages": 64, "max_num_batched_tokens": 24},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_gives_what_it_gives_without_drafts(shape, seed):
    rng = random.Random(f"{shape} {seed}")
    speculation = Knowing(rng)
    make_modes = None
    if shape == "merged weights":
        make_modes = functools.partial(MergeModes, mixture=seed > 0, theta=3.0)
    given = {"speculation": speculation, "make_modes": make_modes}
    driver = Driver(limits(**SHAPES[shape]), ticks=2, **given)
    if make_modes is not None:
        always = types.SimpleNamespace(next=lambda *_: MergeTarget("a"))
        driver.scheduler.modes.policy = always
    added, requests = [], []
    for _ in range(120):
        if rng.random() < 0.25:
            requests.append(driver.add(**random_request(rng)))
            added += requests[-1]
        if requests and rng.random() < 0.05:
            driver.ended += driver.scheduler.abort(rng.choice(requests)[0].request.request_id)
        driver.step(depth=rng.choice([0, 1, 1]))
    driver.run(max_steps=3000)
    for sequence in added:
        check_answer(driver, sequence)
    assert not [s for s in added if s.finish_reason is FinishReason.ERROR]
    stats = speculation.stats
    assert 0 < stats.accepted < stats.tokens
    if make_modes is not None:
        assert any(plan.merged and plan.has_drafts for plan in driver.plans)
    assert stats.accepted == sum(stats.accepted_per_place)
    assert stats.drafts <= stats.tokens <= 4 * stats.drafts


def test_right_drafts_take_fewer_steps():
    steps = {}
    for right in (True, False):
        speculation = Knowing(random.Random(1)) if right else None
        driver = Driver(limits(), speculation=speculation)
        (sequence,) = driver.add([5, 6, 7], max_tokens=30, ignore_eos=True)
        steps[right] = driver.run()
        check_answer(driver, sequence)
    assert steps[True] < 0.75 * steps[False]


def test_guesses_are_trusted_after_right_ones_and_not_after_wrong_ones():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    state = DraftState(Repetitions(tokens, 2, 3))
    assert state.follow(tokens, 100) == 8
    assert state.length(4) == 1  # a first guess is likely enough to be tried
    tokens += [1, 2, 3, 4, 5, 6, 7]
    assert state.follow(tokens, 3) == 3
    assert state.follow(tokens, 100) == 4
    assert state.length(4) == 4
    assert 2.5 < state.expected(0, 4) < 4.0
    assert state.expected(1, 4) < state.expected(0, 4)
    tokens += [4, 1, 2, 9, 2, 3, 9]
    state.follow(tokens, 100)
    assert state.length(4) == 2


def test_nothing_is_guessed_while_drafts_cost_more_than_they_win():
    times, tokens = DraftTimes(), itertools.cycle([7, 8])
    speculation = Speculation(CONFIG, times)
    driver = Driver(limits(num_pages=64, max_num_batched_tokens=24), speculation=speculation)
    (sequence,) = driver.add([next(tokens) for _ in range(9)], max_tokens=45, ignore_eos=True)
    times.add(drafts=False, rows=1, num_tokens=1, right=0, seconds=1.0)
    for _ in range(6):
        assert not times.rest(1)
        times.add(drafts=True, rows=1, num_tokens=5, right=0, seconds=3.0)
    assert times.rest(1)
    driver.run()
    check_answer(driver, sequence)
    assert sequence.draft_state is None
    for _ in range(400):
        times.rest(1)
    assert not times.rest(1)  # they are tried again


def test_tokens_of_a_sequence_without_guesses_are_indexed_together():
    tokens = list(range(20))
    state = DraftState(Repetitions(tokens, 2, 3))
    known = []
    for token in [*range(30, 42), 3, 4, 5, 6, 7, 8, 9, 10]:
        if len(tokens) >= state.due:
            state.follow(tokens, 100)
        known.append(len(tokens) - state.repetitions.num_known)
        tokens.append(token)
    assert known == [0, 1, 2, 3] * 3 + [0, 1, 2, 3] + [0] * 4
    assert not state.is_idle
    tokens += [99, 98]
    state.trust = 0.1
    state.follow(tokens, 1)
    assert state.due <= len(tokens)  # one that is behind catches up at once


class Looking(Speculation):
    """Notes of each step that is looked at which sequences were idle then."""

    def __init__(self):
        super().__init__(CONFIG, Paying())
        self.looks = []

    def extend(self, step, pages, num_running):
        self.looks.append(None)
        super().extend(step, pages, num_running)

    def _drafts_of(self, chunks, room):
        drafts = super()._drafts_of(chunks, room)
        self.looks[-1] = [chunk.sequence.draft_state.is_idle for chunk in chunks]
        return drafts


def test_steps_of_idle_sequences_are_looked_at_each_fourth_time():
    speculation = Looking()
    driver = Driver(limits(num_pages=64, max_num_batched_tokens=24), speculation=speculation)
    for prompts in ([[5, 6, 7]], [[1, 9, 4], [2, 8, 3]]):
        added = [driver.add(prompt, max_tokens=40, ignore_eos=True)[0] for prompt in prompts]
        speculation.looks.clear()
        driver.run()
        for sequence in added:
            check_answer(driver, sequence)
            assert sequence.draft_state.repetitions.num_known > 30
        reading, *looks = speculation.looks
        assert reading is None
        assert looks == [None if i % 4 else [True] * len(prompts) for i in range(len(looks))]


def test_a_sequence_that_repeats_itself_is_looked_at_in_each_step():
    speculation = Looking()
    driver = Driver(limits(num_pages=64, max_num_batched_tokens=24), speculation=speculation)
    (sequence,) = driver.add([1, 9, 4], max_tokens=40, ignore_eos=True)
    for _ in range(20):
        driver.step(depth=0)
    assert speculation.looks[-4:].count(None) == 3
    speculation._unseen = 0
    sequence.draft_state.trust = 0.9
    sequence.draft_state.due = 1 << 30  # what it is trusted with does not change
    sequence.draft_state.is_idle = False
    speculation._is_hopeless = False
    for _ in range(6):
        driver.step(depth=0)
    assert speculation.looks[-6:] == [[False]] * 6


def test_a_sequence_is_hopeless_without_guesses_for_long_or_with_wrong_ones():
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    state = DraftState(Repetitions(tokens, 2, 3))
    state.follow(tokens, 100)
    assert not state.is_hopeless(1)  # it has told nothing yet
    tokens += [3, 4, 5, 6, 1, 2, 3, 4]
    state.follow(tokens, 100)
    assert not state.is_hopeless(1)
    tokens += range(20, 27)
    state.follow(tokens, 100)
    assert not state.is_hopeless(1)  # one token in a while is another
    tokens += range(27, 30)
    state.follow(tokens, 100)
    assert state.is_hopeless(1)
    tokens += [3, 4]
    state.follow(tokens, 100)
    assert not state.is_hopeless(1)
    state.trust = 0.5  # two guesses are right with a chance of a quarter
    assert state.is_hopeless(1)
    assert not state.is_hopeless(0)
    tokens += [50, 51]
    state.follow(tokens, 1)
    assert not state.is_hopeless(1)  # one that is behind catches up at once


def test_steps_that_read_a_prompt_have_no_drafts():
    speculation = Knowing(random.Random(2))
    driver = Driver(limits(num_pages=64, max_num_batched_tokens=6), speculation=speculation)
    driver.add([5, 6, 7], max_tokens=45, ignore_eos=True)
    for _ in range(6):
        driver.step(depth=0)
    assert speculation.stats.drafts
    before = speculation.stats.drafts
    driver.add(range(1, 19), max_tokens=2)
    reading = [driver.step() for _ in range(3)]
    assert not any(plan.has_drafts for plan in reading)
    driver.run()
    assert speculation.stats.drafts > before


def test_drafts_of_bound_rows_take_no_more_masks_than_there_are():
    speculation = Knowing(random.Random(5))
    driver = Driver(limits(num_pages=64, max_num_batched_tokens=24), speculation=speculation)
    bound = [
        one
        for row in range(3)
        for one in driver.add([5, 6, 7 + row], max_tokens=40, ignore_eos=True)
    ]
    for one in bound:
        object.__setattr__(one.request, "grammar", object())
    driver.run()
    drafts = [sum(len(c.drafts) for c in plan.chunks) for plan in driver.plans]
    assert max(drafts) == CONFIG.num_speculative_tokens
    for sequence in bound:
        check_answer(driver, sequence)
