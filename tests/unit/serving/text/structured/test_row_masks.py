"""Masks of a step: who gets one, what it allows, and what a sequence may go through meanwhile."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from support.cases.grammar_cases import vocabulary

from serving.api.request import Request, ScheduledChunk, Sequence, SequenceState, StepPlan
from serving.api.sampling import Sampling
from serving.text.structured.grammars import Grammar
from serving.text.structured.row_masks import (
    GrammarState,
    RowMasks,
    _dealt,
    _guess_efforts,
)
from serving.text.structured.vocabulary import parser_limits

WORDS = -(-len(vocabulary().tokens) // 32)
ENDS = vocabulary().end_ids


@pytest.fixture(scope="module")
def tokenizer():
    return vocabulary().tokenizer()


def token_of(text):
    return vocabulary().tokens.index(text.encode())


@pytest.fixture
def sequence(tokenizer):
    def make(regex="Q(ZX)?", row=0, lark="", **fields):
        grammar = None
        if regex:
            text = LLMatcher.grammar_from_regex(regex)
            if lark:
                text = LLMatcher.grammar_from_lark(lark)
            grammar = Grammar(LLMatcher(tokenizer, text, limits=parser_limits()), 0)
            fields["structured_outputs"] = {"regex": regex}
        sampling = Sampling(**fields)
        request = Request("r", (7, 8), sampling, None, "", print, 0.0, 0.0, grammar=grammar)
        return Sequence(request, 0, 0, [7, 8], state=SequenceState.RUNNING, row=row)

    return make


def plan_of(*sequences, samples=True):
    return StepPlan(tuple(ScheduledChunk(s, 1, 1, samples) for s in sequences))


def fill(plan, rows=8):
    """Ids that each logit row may take, None for any; and sequences that cannot go on.

    A sequence's first logit row is its row in the step.
    """
    words = np.full((rows, WORDS), -1, np.int32)
    row_to_mask = np.full(rows, -1, np.int32)
    masks = RowMasks(ENDS)
    first = [chunk.sequence.row for chunk in plan.chunks]
    filling = masks.start(plan, first, words)
    failed = masks.finish(filling, row_to_mask)
    masks.close()
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    ids = [set(np.flatnonzero(row).tolist()) for row in bits]
    return [None if place < 0 else ids[place] for place in row_to_mask.tolist()], failed


def test_only_drawn_rows_of_bound_sequences_are_masked(sequence):
    bound, free, ended = sequence(row=2), sequence(None, row=3), sequence(row=4)
    ended.state = SequenceState.FINISHED
    void = sequence(row=5)
    void.num_discarded = 1
    plan = plan_of(bound, free, ended, void)
    assert plan.is_bound
    assert not plan_of(bound, samples=False).is_bound
    assert not plan_of(free).is_bound
    allowed, failed = fill(plan)
    assert allowed == [None, None, {token_of("Q")}, None, None, None, None, None]
    assert failed == []


@pytest.mark.parametrize(("count", "cores"), [(1, 8), (8, 8), (8, 1)])  # threads for eight
def test_a_mask_follows_from_the_tokens_so_far(sequence, count, cores, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    rows = [sequence(row=i) for i in range(count)]
    fill(plan_of(*rows))
    for one in rows:
        one.token_ids.append(token_of("Q"))
    after, _ = fill(plan_of(*rows))
    assert after[:count] == [{token_of("Z"), *ENDS}] * count
    # Preempted before its second token was masked: two tokens at once.
    late = sequence(row=0)
    late.token_ids += [token_of("Q"), token_of("Z")]
    assert fill(plan_of(late))[0][0] == {token_of("X")}


def test_min_tokens_and_ignore_eos_hold_ends_back_where_there_is_a_choice(sequence):
    for fields in ({"min_tokens": 2, "max_tokens": 9}, {"ignore_eos": True}):
        one = sequence("Q(Z)?", **fields)
        one.token_ids.append(token_of("Q"))
        allowed, _ = fill(plan_of(one))
        assert not allowed[0] & set(ENDS)
        assert token_of("Z") in allowed[0]
        one = sequence("Q", **fields)
        one.token_ids.append(token_of("Q"))
        assert fill(plan_of(one))[0][0] == set(ENDS)  # nothing else is left


def test_stop_tokens_are_held_back_before_min_tokens(sequence):
    stop = token_of("Z")
    one = sequence("[ZX]", min_tokens=1, max_tokens=9, stop_token_ids=(stop,))
    assert fill(plan_of(one))[0][0] == {token_of("X")}


def test_tokens_outside_of_the_grammar_fail_their_sequence_alone(sequence):
    bad, good = sequence(row=0), sequence(row=1)
    bad.token_ids.append(token_of("X"))
    allowed, failed = fill(plan_of(bad, good))
    assert [one.sequence for one in failed] == [bad]
    assert "grammar" in failed[0].why
    assert not failed[0].bad_request  # the mask before did not hold
    assert allowed[:2] == [None, {token_of("Q")}]


def test_a_grammar_that_runs_out_of_states_fails_its_sequence(sequence, tokenizer):
    text = LLMatcher.grammar_from_regex("(.*Q.{20}){3}")
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(max_lexer_states=300))
    one = sequence("x")
    object.__setattr__(one.request, "grammar", Grammar(matcher, 0))
    failed = []
    for _ in range(200):
        _, failed = fill(plan_of(one))
        if failed:
            break
        one.token_ids.append(token_of("Q"))
    assert failed
    assert "too many states" in failed[0].why
    assert failed[0].bad_request


def test_a_grammar_that_cannot_start_fails_its_sequence_alone(sequence):
    bad, good, failed = sequence(row=0), sequence(row=1), []
    broken = SimpleNamespace(start=lambda: 1 / 0)
    object.__setattr__(bad.request, "grammar", broken)
    allowed, failed = fill(plan_of(bad, good))
    assert allowed[:2] == [None, {token_of("Q")}]
    assert [one.sequence for one in failed] == [bad]
    assert not failed[0].bad_request
    assert "grammar cannot go on: division by zero" in failed[0].why
    masks, told = RowMasks(ENDS), []
    words, row_to_mask = np.zeros((2, WORDS), np.int32), np.full(2, -1, np.int32)
    step = plan_of(bad, good), [0, 1]
    failed = masks.post(*step, words, row_to_mask, lambda: told.append(row_to_mask.tolist()))
    assert [one.sequence for one in failed] == [bad]
    assert told == [[-1, 0]]


def test_masks_that_cannot_be_made_fail_their_sequences_and_the_step_goes_on(sequence):
    one, masks, told = sequence(), RowMasks(ENDS), []
    masks._fill_here = lambda filling: 1 / 0
    words, row_to_mask = np.zeros((1, WORDS), np.int32), np.full(1, -1, np.int32)
    step = plan_of(one), [0]
    failed = masks.post(*step, words, row_to_mask, lambda: told.append(row_to_mask.tolist()))
    assert [bad.sequence for bad in failed] == [one]
    assert told == [[-1]]
    filling = masks.start(*step, words)
    assert [bad.sequence for bad in masks.finish(filling, row_to_mask)] == [one]


def drafted(sequence, *texts):
    """A step of one sequence with drafts."""
    drafts = tuple(token_of(text) for text in texts)
    chunk = ScheduledChunk(sequence, 1, 1 + len(drafts), True, drafts=drafts)
    return StepPlan((chunk,))


def test_each_draft_is_followed_by_the_mask_of_what_stands_before(sequence):
    one = sequence("QZX?", row=1)
    want, alone = [], sequence("QZX?", row=1)
    for text in ("Q", "Z"):
        want.append(fill(plan_of(alone))[0][1])
        alone.token_ids.append(token_of(text))
    want.append(fill(plan_of(alone))[0][1])
    assert fill(drafted(one, "Q", "Z"))[0] == [None, *want, None, None, None, None]
    # The drafts are not taken: without them the mask is that of the start.
    assert fill(plan_of(one))[0][1] == {token_of("Q")}


@pytest.mark.parametrize("attribute", ["max_tokens=2", 'stop="X"', 'suffix="X"', "lazy"])
def test_drafts_are_taken_back_from_a_grammar_that_counts_tokens(sequence, attribute):
    """Before: such an answer ended in an error with its first draft."""
    lark = f'start: some "Z" | some "V"\nsome[{attribute}]: /[QX]+/'
    one, alone = sequence(lark=lark), sequence(lark=lark)
    want = []
    for text in ("Q", "Q", "Z"):
        want.append(fill(plan_of(alone))[0][0])
        alone.token_ids.append(token_of(text))
    allowed, failed = fill(drafted(one, "Q", "Q"))
    assert (allowed[:3], failed) == (want, [])
    one.token_ids.append(token_of("Q"))
    assert fill(plan_of(one)) == ([want[1], *[None] * 7], [])
    assert fill(drafted(one, "Q"))[0][:2] == want[1:]


def test_a_grammar_that_cannot_go_on_after_a_draft_fails_its_sequence(sequence, tokenizer):
    one = sequence(lark='start: some "Z"\nsome[max_tokens=9]: /(Q|X)*Q(Q|X){9}/')
    few = LLParserLimits(step_lexer_fuel=1, verbose_errors=False)
    text = LLMatcher.grammar_from_lark('start: some "Z"\nsome[max_tokens=9]: /(Q|X)*Q(Q|X){9}/')
    one.request.grammar._compiled = [LLMatcher(tokenizer, text, limits=few)]
    allowed, failed = fill(drafted(one, "Q", "Q"))
    assert [bad.sequence for bad in failed] == [one]
    assert "grammar cannot go on" in failed[0].why
    assert allowed == [None] * 8


def test_rows_after_a_draft_that_does_not_fit_are_free(sequence):
    allowed, failed = fill(drafted(sequence("QZX"), "Q", "X", "X"))
    assert allowed == [{token_of("Q")}, {token_of("Z")}, *[None] * 6]
    assert failed == []


def test_ends_are_held_back_by_the_length_with_drafts(sequence):
    one = sequence("Q*", min_tokens=2, max_tokens=9)
    allowed, _ = fill(drafted(one, "Q", "Q"))
    assert [bool(row & set(ENDS)) for row in allowed[:3]] == [False, False, True]


def test_masks_of_a_step_that_did_not_wait_are_made_before_the_next_ones(sequence):
    masks, may, told = RowMasks(ENDS), threading.Event(), []
    masks._few, fill = 1, masks._fill  # another thread's work
    masks._fill = lambda *given: may.wait(60) and fill(*given)
    words, row_to_mask = np.zeros((1, WORDS), np.int32), np.full(1, -1, np.int32)
    step = plan_of(sequence()), [0]
    masks.post(*step, words, row_to_mask, lambda: told.append(row_to_mask.tolist()))
    assert told == []
    threading.Timer(0.05, may.set).start()
    masks.settle()
    assert told == [[0]]
    masks.settle()  # nothing is left to wait for
    masks.close()


def test_rows_whose_masks_may_take_long_begin_pieces_of_their_own(sequence):
    """A mask of many tokens, yet not of all, is followed by one that takes long."""
    one = sequence()
    matcher = one.request.grammar.start()
    rows = [(one, GrammarState(matcher, 2, False, False), i, i, [], ()) for i in range(16)]
    words = np.full((16, 320), 7 << 29, np.uint32).view(np.int32)  # a tenth of the tokens
    words[4:] = 0
    words[8:12] = -1
    _guess_efforts(rows, words)
    efforts = [state.effort for _, state, *_ in rows]
    assert efforts == [2] * 4 + [0] * 4 + [1] * 4 + [0] * 4
    order = [place for _, _, _, place, *_ in _dealt(rows, num_threads=2)]  # four pieces of four
    assert order[::4] == [0, 1, 2, 3]
    assert order[1::4] == [8, 9, 10, 11]
    assert sorted(order) == list(range(16))


def test_threads_are_bounded_by_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(10)))
    assert [RowMasks(ENDS, most)._num_threads for most in (4, 12)] == [4, 8]
