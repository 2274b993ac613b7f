"""Deltas become answers, in order of choices, and errors become exceptions."""

import pytest

from serving.api.outputs import BadRequest, OutputCollector, RequestFailed, failure
from serving.api.request import FinishReason, OutputDelta, TokenLogprobs


def delta(index, text, tokens, **fields):
    return OutputDelta("r", index, text, tuple(tokens), **fields)


def test_choices_are_joined_by_index():
    collector = OutputCollector((1, 2), "sql", 2)
    entry = TokenLogprobs(5, -1.0, 1, {5: -1.0})
    scored = (None, entry)
    for one in (
        delta(1, "x", [7]),
        delta(0, "a", [5], logprobs=(entry,), prompt_logprobs=scored, num_cached_tokens=4),
        delta(1, "", [], finish_reason=FinishReason.ABORT),
        delta(0, "b", [6], logprobs=(entry,), finish_reason=FinishReason.STOP, stop_reason=6),
    ):
        assert not collector.done
        collector.add(one)
    assert collector.done
    output = collector.output()
    assert (output.request_id, output.prompt_ids, output.adapter) == ("r", (1, 2), "sql")
    assert (output.prompt_logprobs, output.num_cached_tokens) == (scored, 4)
    first, second = output.outputs
    assert (first.text, first.token_ids, first.logprobs) == ("ab", (5, 6), (entry, entry))
    assert (first.finish_reason, first.stop_reason) == (FinishReason.STOP, 6)
    assert (second.index, second.text, second.token_ids) == (1, "x", (7,))
    assert second.finish_reason is FinishReason.ABORT


def test_an_error_is_raised_with_its_message():
    collector = OutputCollector((1,), None, 1)
    collector.add(delta(0, "", [], finish_reason=FinishReason.ERROR, error="no", retryable=True))
    assert collector.done
    with pytest.raises(RequestFailed, match="no") as caught:
        collector.output()
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("flags", "is_of_request", "retryable"),
    [
        ({"bad_request": True}, True, False),
        ({"retryable": True}, False, True),
        ({}, False, False),
    ],
)
def test_the_type_of_an_error_says_whose_fault_it_is(flags, is_of_request, retryable):
    last = delta(0, "", [], finish_reason=FinishReason.ERROR, error="why", **flags)
    collector = OutputCollector((1,), None, 1)
    collector.add(last)
    with pytest.raises(RequestFailed) as caught:
        collector.output()
    for error in (failure(last), caught.value):
        assert str(error) == "why"
        assert isinstance(error, RequestFailed)
        assert isinstance(error, ValueError) is isinstance(error, BadRequest) is is_of_request
        assert error.retryable is retryable


def test_an_answer_has_its_prompt_s_text_and_a_sum_of_logprobs():
    collector = OutputCollector((1, 2), None, 2, "hi")
    for index, entries in ((0, (-1.0, -0.5)), (1, ())):
        scored = tuple(TokenLogprobs(5, value, 1, {}) for value in entries)
        done = FinishReason.STOP
        collector.add(delta(index, "x", [5], logprobs=scored, finish_reason=done))
    output = collector.output()
    assert (output.prompt, output.prompt_token_ids) == ("hi", (1, 2))
    assert [one.cumulative_logprob for one in output.outputs] == [-1.5, None]
