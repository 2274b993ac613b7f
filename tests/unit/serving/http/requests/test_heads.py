"""Requests for text that a task head answers, and the fields that it refuses."""

from types import SimpleNamespace

import pytest

from lora_jax.adapters.task_head import HeadKind, TaskHead
from serving.http.errors import ApiError
from serving.http.requests.heads import by_head, check_classify, with_length
from serving.http.requests.model_names import Target
from serving.http.requests.parameters import chat_sampling
from serving.http.requests.protocol import ChatBody, ClassifyBody, CompletionBody

HEAD = TaskHead(HeadKind.CLASS, ("a", "b"))
HEADED = Target("x", "x", SimpleNamespace(report=SimpleNamespace(head=HEAD)))
PLAIN = Target("y", "y", SimpleNamespace(report=SimpleNamespace(head=None)))
BASE = Target("base", None)


def chat(**fields) -> ChatBody:
    return ChatBody(messages=[], **fields)


def refused(field, call, *given):
    with pytest.raises(ApiError) as error:
        call(*given)
    assert (error.value.status, error.value.param) == (400, field)
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "target", "want"),
    [
        ({}, HEADED, True),
        ({"head": "task", "max_tokens": 9, "temperature": 1.0, "n": 1}, HEADED, True),
        ({"head": "lm", "n": 2}, HEADED, False),
        ({}, PLAIN, False),
        ({"head": "lm"}, BASE, False),
        ({"tool_choice": "auto", "tools": [], "stream": False}, HEADED, True),
        ({"response_format": {"type": "text"}}, HEADED, True),
    ],
)
def test_the_head_answers_where_there_is_one(fields, target, want):
    assert by_head(chat(**fields), target) is want


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"top_logprobs": 2},
        {"prompt_logprobs": 0},
        {"echo": True},
        {"logit_bias": {"5": 1.0}},
        {"min_tokens": 3},
        {"stop_token_ids": [7]},
    ],
)
def test_what_only_text_has_is_refused(fields):
    (name,) = fields
    assert name in refused(name, by_head, chat(**fields), HEADED)
    assert not by_head(chat(**fields), PLAIN)


def test_a_head_may_be_asked_for_no_tokens():
    body = chat(max_tokens=0, max_completion_tokens=0)
    with pytest.raises(ApiError, match="max_completion_tokens"):
        chat_sampling(with_length(body, False), 9, {})
    chat_sampling(with_length(body, True), 9, {})
    with pytest.raises(ApiError, match="max_tokens"):
        chat_sampling(with_length(chat(max_tokens=-1), True), 9, {})


def test_logprobs_of_completions_are_numbers():
    body = CompletionBody(prompt="x", logprobs=0)
    assert 'send "head": "lm"' in refused("logprobs", by_head, body, HEADED)


def test_a_head_must_be_there_to_be_asked():
    refused("head", by_head, chat(head="task"), PLAIN)
    refused("head", by_head, chat(head="score"), HEADED)
    check_classify(ClassifyBody(input="x"), HEADED)
    check_classify(ClassifyBody(messages=[]), HEADED)
    refused("model", check_classify, ClassifyBody(input="x"), BASE)
    refused("input", check_classify, ClassifyBody(), HEADED)


def test_classify_has_no_other_head():
    """It would answer by the task head what was asked in words."""
    check_classify(ClassifyBody(input="x", head="task"), HEADED)
    told = refused("head", check_classify, ClassifyBody(input="x", head="lm"), HEADED)
    assert "/v1/chat/completions" in told
