"""Results of steps become deltas: text, log-probabilities, ends, and times for the metrics."""

import pytest

from serving.api.request import (
    FinishReason,
    OutputDelta,
    Request,
    ScheduledChunk,
    Sequence,
    SequenceResult,
    TokenLogprobs,
)
from serving.api.sampling import Sampling
from serving.engine.loop.live_request import LiveRequest
from serving.engine.metrics.metrics import EngineMetrics
from serving.scheduling.scheduler import Progress


class Case:
    """A live request over a prompt of three tokens, and everything it said."""

    def __init__(self, tokenizer, sampling):
        self.deltas, self.tokenizer = [], tokenizer
        self.metrics = EngineMetrics("tiny", 64, {}, 1)
        self.request = Request("r", (4, 5, 6), sampling, "sql", "d", self.deltas.append, 100.0, 0.0)
        self.sequences = [
            Sequence(self.request, index, seed=0, token_ids=[4, 5, 6])
            for index in range(sampling.n)
        ]
        for sequence in self.sequences:
            sequence.first_scheduled_s, sequence.num_cached_tokens = 101.0, 2
        self.live = LiveRequest(self.request, self.sequences, tokenizer, self.metrics)

    def deliver(self, token, *, index=0, now=102.0, reason=None, stop=None, **fields):
        """Return whether a stop string ended the choice; an end is known before it is told."""
        sequence, num_told, stopped = self.sequences[index], len(self.deltas), []

        def ending(live, of, by_stop_string):
            assert (live, of, len(self.deltas)) == (self.live, sequence, num_told)
            stopped.append(by_stop_string)

        chunk = ScheduledChunk(sequence, 0, 3, samples=token is not None)
        result = SequenceResult(chunk, token, **fields)
        self.live.deliver(Progress(sequence, result, reason, stop), now, ending)
        assert len(stopped) == sum(d.finish_reason is not None for d in self.deltas[num_told:])
        return any(stopped)

    def say(self, text, **fields):
        return [self.deliver(token, **fields) for token in self.tokenizer.encode(text)]

    def value(self, name, **labels):
        labels = {"model_name": "tiny", "engine": "0", **labels}
        return self.metrics.registry.get_sample_value(name, labels)


def entry(token):
    return TokenLogprobs(token, -1.0, 1, {token: -1.0})


def test_tokens_become_text_one_delta_each(tokenizer):
    case = Case(tokenizer, Sampling())
    assert not any(case.say("ab"))
    case.deliver(tokenizer.encode("c")[0], reason=FinishReason.LENGTH)
    assert [delta.text for delta in case.deltas] == ["a", "b", "c"]
    assert [len(delta.token_ids) for delta in case.deltas] == [1, 1, 1]
    assert [delta.finish_reason for delta in case.deltas] == [None, None, FinishReason.LENGTH]
    assert {delta.num_cached_tokens for delta in case.deltas} == {2}
    ids = tuple(tokenizer.encode("a"))
    assert case.deltas[0] == OutputDelta("r", 0, "a", ids, num_cached_tokens=2, adapter="sql")
    assert case.live.done
    assert not case.say("d")[0]
    assert len(case.deltas) == 3  # what comes after the end is ignored


def test_a_stop_string_ends_the_choice_before_the_scheduler_knows(tokenizer):
    case = Case(tokenizer, Sampling(stop="cd"))
    assert case.say("abcd") == [False, False, False, True]
    assert "".join(delta.text for delta in case.deltas) == "ab"
    last = case.deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "cd")
    assert case.live.done


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ends_a_choice_is_shown_only_when_asked(tokenizer, include):
    case = Case(tokenizer, Sampling(stop="xy", include_stop_str_in_output=include))
    case.say("ax")  # x is held back: it may begin the stop string
    token = tokenizer.encode("z")[0]
    assert not case.deliver(token, reason=FinishReason.STOP, stop=token)
    assert "".join(delta.text for delta in case.deltas) == ("axz" if include else "ax")
    assert case.deltas[-1].stop_reason == token
    assert case.deltas[-1].token_ids == (token,)


def test_prompt_logprobs_come_whole_with_the_first_delta(tokenizer):
    case = Case(tokenizer, Sampling(prompt_logprobs=1, logprobs=1))
    case.deliver(None, prompt_logprobs=(entry(5),))
    assert case.deltas == []
    case.deliver(7, prompt_logprobs=(entry(6),), logprobs=entry(7))
    case.deliver(8, logprobs=entry(8), reason=FinishReason.LENGTH)
    assert case.deltas[0].prompt_logprobs == (None, entry(5), entry(6))
    assert case.deltas[1].prompt_logprobs is None
    assert [delta.logprobs for delta in case.deltas] == [(entry(7),), (entry(8),)]


def test_a_scored_prompt_ends_without_a_token(tokenizer):
    case = Case(tokenizer, Sampling(max_tokens=0, prompt_logprobs=0))
    scored = (entry(5), entry(6))
    assert not case.deliver(None, reason=FinishReason.LENGTH, prompt_logprobs=scored)
    (delta,) = case.deltas
    assert (delta.token_ids, delta.prompt_logprobs) == ((), (None, *scored))


def test_without_text_there_are_ids_only(tokenizer):
    case = Case(tokenizer, Sampling(detokenize=False))
    case.say("ab")
    assert [delta.text for delta in case.deltas] == ["", ""]
    assert all(delta.token_ids for delta in case.deltas)


def test_an_end_from_outside_gives_what_was_held_back_once(tokenizer):
    case = Case(tokenizer, Sampling(stop="abc", n=2))
    case.say("ab", index=1)
    assert case.live.unfinished() == case.sequences
    case.live.end(case.sequences[1], FinishReason.ABORT, None, retryable=False)
    case.live.end(case.sequences[1], FinishReason.ERROR, "late", retryable=True)
    assert "".join(delta.text for delta in case.deltas) == "ab"
    assert case.deltas[-1].finish_reason is FinishReason.ABORT
    assert case.live.unfinished() == case.sequences[:1]
    assert case.live.summary(9.0).outcome() is None  # ended by its caller
    case.live.end(case.sequences[0], FinishReason.ERROR, "why", retryable=True)
    assert (case.deltas[-1].error, case.deltas[-1].retryable) == ("why", True)
    assert case.live.done


@pytest.mark.parametrize("flag", ["retryable", "bad_request", "of_server"])
def test_an_error_of_the_request_or_the_server_is_no_outcome_of_its_adapter(tokenizer, flag):
    """As where the request asked for it, or where all adapter slots were taken."""
    case = Case(tokenizer, Sampling())
    case.say("a")
    case.live.end(case.sequences[0], FinishReason.ERROR, "why", **{flag: True})
    assert case.deltas[-1].bad_request is (flag == "bad_request")
    outcome = case.live.summary(9.0).outcome()
    assert (outcome is None) is (flag != "retryable")
    assert outcome is None or outcome.failed


def test_times_and_counts_reach_the_metrics(tokenizer):
    case = Case(tokenizer, Sampling(n=2))
    case.say("a", index=0, now=103.0)
    case.say("bc", index=1, now=104.0)
    case.deliver(9, index=0, now=103.5, reason=FinishReason.LENGTH)
    case.deliver(9, index=1, now=106.0, reason=FinishReason.STOP)
    assert case.value("vllm:time_to_first_token_seconds_sum") == 3.0
    assert case.value("vllm:time_to_first_token_seconds_count") == 1
    assert case.value("vllm:inter_token_latency_seconds_count") == 0  # with the step's end
    case.metrics.tokens_generated(5)
    assert case.value("vllm:inter_token_latency_seconds_count") == 3
    assert case.value("vllm:inter_token_latency_seconds_sum") == 0.5 + 0.0 + 2.0
    assert case.value("vllm:prompt_tokens_total") == 3
    assert case.value("vllm:prompt_tokens_cached_total") == 2
    summary = case.live.summary(107.0)
    assert summary.output_lengths == (2, 3)
    assert summary.reasons == ("length", "stop")
    assert (summary.arrival_s, summary.scheduled_s) == (100.0, 101.0)
    assert (summary.first_token_s, summary.finished_s) == (103.0, 107.0)
    assert (summary.num_prompt, summary.num_cached, summary.adapter) == (3, 2, "sql")
