"""A function's calls to itself before its first one: what they ask; they leave no count."""

import threading
from types import SimpleNamespace

from serving.functions.rehearsal import rehearse


class Metrics:
    """Counts as an engine's thread does: a moment after the answer."""

    def __init__(self):
        self.requests_done, self.forgotten_at = 0, []

    def forget_requests(self):
        self.forgotten_at.append(self.requests_done)


class Engine:
    def __init__(self, error=None):
        self.metrics, self.asked, self.error = Metrics(), [], error

    def generate(self, prompts, adapter, sampling):
        self.asked.append((adapter, len(prompts), sampling.max_tokens))
        if self.error is not None:
            raise self.error
        threading.Timer(0.02, self.count).start()
        return ["answer"]

    def count(self):
        self.metrics.requests_done += 1


def test_counts_are_set_back_once_the_last_request_is_counted():
    engine, asked = Engine(), []
    http = SimpleNamespace(rehearse=lambda adapter, prompt: asked.append(adapter) or 0)
    rehearse(engine, "law", http)
    assert engine.asked == [("law", 1, 2)] * 2
    assert asked == ["law", "law"]
    assert engine.metrics.forgotten_at == [2]


def test_an_adapter_that_answers_no_text_is_no_error():
    engine = Engine(ValueError("the adapter has a task head alone"))
    rehearse(engine, "intent")
    assert engine.metrics.forgotten_at == [0]
