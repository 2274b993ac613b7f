"""A function's calls to itself before its first one: what they ask; they leave no count."""

import threading
import time
from types import SimpleNamespace

import pytest

from serving.functions import rehearsal
from serving.functions.rehearsal import LENGTHS, SHORT, prompts_of, rehearse


def nobody() -> bool:
    return False


class Metrics:
    """Counts as an engine's thread does: a moment after the answer."""

    def __init__(self):
        self.requests_done, self.forgotten_at = 0, []

    def forget_requests(self):
        self.forgotten_at.append(self.requests_done)


class Engine:
    """Remembers prompts, and whether prefixes were remembered when they came."""

    def __init__(self, error=None):
        self.metrics, self.asked, self.error = Metrics(), [], error
        self.config = SimpleNamespace(otlp_traces_endpoint=None)
        self.tokenizer = SimpleNamespace(encode=lambda text: [7, 8])
        self.model_info = SimpleNamespace(max_model_len=1024)
        self.remembers = True

    def remember_prefixes(self, wanted):
        self.remembers = wanted

    def ask(self, prompt):
        self.asked.append((prompt, self.remembers))
        if self.error is not None:
            raise self.error
        threading.Timer(0.02, self.count).start()
        return True

    def count(self):
        self.metrics.requests_done += 1


def no_routes(prompt):
    return 0


def test_counts_are_set_back_once_the_last_request_is_counted(monkeypatch):
    engine, asked, now = Engine(), [], [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(rehearsal, "time", clock)

    def answer(prompt):
        asked.append(prompt)
        now[0] += 100  # however long the calls take, the last one is waited for
        return 0

    rehearse(engine, engine.ask, answer, nobody)
    assert engine.asked == [(prompt, False) for prompt in prompts_of(engine)] * 2
    assert asked == ["a", "a"]
    assert engine.metrics.forgotten_at == [8]


@pytest.mark.parametrize("ids", [[7], [7, 8, 9], []])
def test_prompts_fill_steps_of_several_sizes_whatever_the_tokenizer(ids):
    engine = Engine()
    engine.tokenizer.encode = lambda text: ids
    text, *prompts = prompts_of(engine)
    assert (text, [len(prompt) for prompt in prompts]) == (SHORT, list(LENGTHS))
    assert {token for prompt in prompts for token in prompt} == set(ids or [0])


def test_no_prompt_is_longer_than_the_model_takes():
    engine = Engine()
    engine.model_info.max_model_len = LENGTHS[1] + 2
    assert [len(prompt) for prompt in prompts_of(engine)[1:]] == list(LENGTHS[:2])
    engine.model_info.max_model_len = LENGTHS[1] + 1
    assert [len(prompt) for prompt in prompts_of(engine)[1:]] == [LENGTHS[0]]


def test_an_adapter_that_answers_no_text_is_no_error():
    engine = Engine(ValueError("the adapter has a task head alone"))
    rehearse(engine, engine.ask, no_routes, nobody)
    assert engine.metrics.forgotten_at == [0]


def test_a_caller_waits_for_one_call_of_a_rehearsal_at_most(monkeypatch):
    monkeypatch.setattr(rehearsal, "_COUNTED_S", 60.0)
    engine = Engine()
    rehearse(engine, engine.ask, no_routes, lambda: len(engine.asked) == 1)
    assert len(engine.asked) == 1
    assert engine.metrics.forgotten_at == [1]
    assert engine.remembers


def test_an_engine_that_sends_traces_sends_none_of_a_rehearsal():
    engine = Engine()
    engine.config.otlp_traces_endpoint = "http://localhost:4318/v1/traces"
    rehearse(engine, engine.ask, no_routes, nobody)
    assert engine.asked == []
