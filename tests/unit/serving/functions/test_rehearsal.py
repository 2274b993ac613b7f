"""A function's calls to itself before its first one: what they ask; they leave no count."""

import threading
import time
from types import SimpleNamespace

from serving.functions import rehearsal
from serving.functions.rehearsal import PROMPTS, rehearse


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
    assert engine.asked == [(prompt, False) for prompt in PROMPTS] * 2
    assert asked == ["a", "a"]
    assert engine.metrics.forgotten_at == [4]


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
