"""Answers of task heads for Python callers, and who may ask one."""

import dataclasses
from types import SimpleNamespace

import pytest

from lora_jax.adapters.task_head import HeadAnswer, HeadKind, TaskHead
from serving.api.outputs import Completion, RequestOutput
from serving.api.request import FinishReason
from serving.engine.classification import HEAD_SAMPLING, asked_head, classified

HEAD = TaskHead(HeadKind.CLASS, ("a", "b"))


def entry(head):
    return SimpleNamespace(report=SimpleNamespace(head=head))


def test_only_an_adapter_with_a_head_is_asked():
    assert asked_head("x", entry(HEAD), HEAD_SAMPLING) is HEAD
    with pytest.raises(ValueError, match="base model has no task head"):
        asked_head(None, None, HEAD_SAMPLING)
    with pytest.raises(ValueError, match="'x' has no task head"):
        asked_head("x", entry(None), HEAD_SAMPLING)
    with pytest.raises(ValueError, match="must be HEAD_SAMPLING"):
        asked_head("x", entry(HEAD), dataclasses.replace(HEAD_SAMPLING, max_tokens=1))


def test_an_answer_has_vllm_s_names():
    answer = HeadAnswer((0.0, 1.0), (0.25, 0.75), 1, "b", ("b",))
    choice = Completion(0, "b", (), FinishReason.STOP, head=answer)
    got = classified(RequestOutput("7", (1, 2), "x", (choice,), None, 1, "p", "v2"))
    assert got.outputs.probs == got.probs == (0.25, 0.75)
    assert (got.label, got.prompt_token_ids, got.prompt) == ("b", (1, 2), "p")
    assert (got.adapter, got.adapter_version, got.num_cached_tokens) == ("x", "v2", 1)
