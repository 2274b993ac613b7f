"""Messages between an agent and its functions survive JSON."""

import json

import pytest

from lora_jax.adapters.registry_errors import AdapterNotFound, AdapterRejected, HostFull
from serving.api.outputs import BadRequest, Completion, RequestFailed, RequestOutput
from serving.api.request import EngineDead, FinishReason, QueueFull, TokenLogprobs
from serving.api.sampling import Sampling
from serving.api.structured_outputs import StructuredOutputs
from serving.functions.messages import (
    DeviceFull,
    error_fields,
    error_of,
    output_fields,
    output_of,
    sampling_fields,
    sampling_of,
    value_of_start,
)

ENTRY = TokenLogprobs(7, -0.5, 1, {7: -0.5, 9: -1.25})
ANSWER = RequestOutput(
    "r1",
    (1, 2),
    "law",
    (
        Completion(0, "text", (7, 2), FinishReason.STOP, "x", (ENTRY, ENTRY)),
        Completion(1, "", (), None),
    ),
    (None, ENTRY),
    3,
    "a prompt",
)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(max_tokens=3, temperature=0.25, stop=("a", "b"), logprobs=2, seed=5),
        Sampling(logit_bias={3: -1.5, 8: 2.0}, allowed_token_ids=(3, 8), bad_words=("no",)),
        Sampling(max_tokens=0, echo=True, prompt_logprobs=1),
    ],
)
def test_samplings_arrive_as_they_were(sampling):
    assert sampling_of(json.loads(json.dumps(sampling_fields(sampling)))) == sampling


def test_structured_outputs_are_refused_by_name():
    with pytest.raises(ValueError, match="structured_outputs do not work in a function"):
        sampling_fields(Sampling(structured_outputs=StructuredOutputs(regex="a+")))


def test_fields_that_are_none_of_a_sampling_are_refused():
    with pytest.raises(TypeError, match="nonsense"):
        sampling_of({"nonsense": 1})
    with pytest.raises(ValueError, match="temperature"):
        sampling_of({"temperature": -1.0})


def test_answers_arrive_as_they_were():
    assert output_of(json.loads(json.dumps(output_fields(ANSWER)))) == ANSWER


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (BadRequest("no token is left"), BadRequest, False),
        (AdapterRejected("rank 99"), ValueError, None),  # a subclass is still the request's fault
        (AdapterNotFound("sql", ()), KeyError, None),
        (TypeError("not a text"), TypeError, None),
        (RequestFailed("late", retryable=True), RequestFailed, True),
        (RequestFailed("not finite"), RequestFailed, False),
        (QueueFull("Full.", 1.0), RequestFailed, True),
        (EngineDead("stopped"), RequestFailed, False),
        (ConnectionError("no answer"), RequestFailed, True),
        (HostFull("Host memory is full.", 1.0), RequestFailed, True),
    ],
)
def test_an_error_arrives_as_the_request_s_fault_or_the_server_s(error, kind, retryable):
    arrived = error_of(json.loads(json.dumps(error_fields(error))))
    assert type(arrived) is kind
    assert str(error) in str(arrived) or kind is KeyError
    assert getattr(arrived, "retryable", None) is retryable


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AdapterRejected("rank 99"), ValueError),
        (KeyError("folder"), ValueError),
        (HostFull("Host memory is full."), DeviceFull),
        (ConnectionError("no answer"), ConnectionError),
        (None, ConnectionError),
    ],
)
def test_a_start_that_fails_says_whether_another_try_may_do(error, kind):
    answer = None if error is None else json.loads(json.dumps(error_fields(error)))
    with pytest.raises(kind) as raised:
        value_of_start("law", "The engine", answer)
    assert type(raised.value) is kind
    wanted = "The engine ended" if error is None else f"'law' cannot start: {error}"
    assert wanted in str(raised.value)
    assert value_of_start("law", "The engine", {"value": 7}) == 7
