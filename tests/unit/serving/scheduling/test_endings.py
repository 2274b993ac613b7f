"""Results of a step: tokens taken in, and the token with which a sequence ends."""

import pytest

from serving.api.request import FinishReason, Request, ScheduledChunk, Sequence, SequenceResult
from serving.api.sampling import Sampling
from serving.scheduling.endings import ending, take_in


@pytest.mark.parametrize(
    ("outputs", "sampling", "want"),
    [
        ([5], {}, (None, None)),
        ([0], {}, (FinishReason.STOP, None)),
        ([0], {"ignore_eos": True}, (None, None)),
        ([0], {"min_tokens": 2}, (None, None)),
        ([5, 0], {"min_tokens": 2}, (FinishReason.STOP, None)),
        ([7], {"stop_token_ids": [7]}, (FinishReason.STOP, 7)),
        ([5, 5, 5, 5], {}, (FinishReason.LENGTH, None)),
        ([5, 5, 5, 0], {}, (FinishReason.STOP, None)),
    ],
)
def test_reasons(outputs, sampling, want):
    settings = Sampling(max_tokens=4, **sampling)
    request = Request("r", (1, 2), settings, None, "", lambda delta: None, 0.0, 0.0)
    sequence = Sequence(request, 0, 0, [1, 2, *outputs], max_outputs=4)
    assert ending(sequence, outputs[-1], {0}) == want


def result(token: int | None, *, samples: bool, end: int = 2, max_outputs: int = 4):
    request = Request("r", (1, 2), Sampling(), None, "", lambda delta: None, 0.0, 0.0)
    sequence = Sequence(request, 0, 0, [1, 2], max_outputs=max_outputs)
    return SequenceResult(ScheduledChunk(sequence, 0, end, samples=samples), token)


def test_a_drawn_token_is_taken_in_with_the_time_of_the_first():
    progress = take_in(result(5, samples=True), 3.0, {0})
    assert progress.sequence.token_ids == [1, 2, 5]
    assert progress.sequence.first_token_s == 3.0
    assert progress.finish_reason is None
    assert take_in(result(0, samples=True), 3.0, {0}).finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("end", "max_outputs", "want"), [(2, 4, None), (1, 0, None), (2, 0, FinishReason.LENGTH)]
)
def test_a_chunk_that_draws_nothing_ends_only_a_prompt_that_was_to_be_read(end, max_outputs, want):
    progress = take_in(result(None, samples=False, end=end, max_outputs=max_outputs), 3.0, {0})
    assert progress.finish_reason is want
    assert progress.sequence.token_ids == [1, 2]


def test_a_token_that_is_missing_is_named():
    with pytest.raises(ValueError, match="No token came back for r"):
        take_in(result(None, samples=True), 3.0, {0})
