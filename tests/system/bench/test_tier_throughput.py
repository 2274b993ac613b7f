import json
import random
from types import SimpleNamespace

import pytest

from bench import crowd as crowd_
from bench import tier_throughput as bench


def test_adapters_of_shared_files_have_digests_of_their_own(tmp_path):
    names = bench.write_adapters(tmp_path, bench.SMALL, bench.DISTINCT + 2)
    first, again = (tmp_path / names[n] for n in (0, bench.DISTINCT))
    inodes = {(folder / "adapter_model.safetensors").stat().st_ino for folder in (first, again)}
    configs = {(folder / "adapter_config.json").read_text() for folder in (first, again)}
    assert len(inodes) == 1
    assert len(configs) == 2
    assert json.loads(configs.pop())["target_modules"] == ["q_proj", "v_proj"]


def test_a_tenth_of_the_requests_asks_the_base_model():
    rng, case = random.Random(0), bench.Case()
    asked = [crowd_.next_asked(["a0", "a1"], [1.0, 1.5], case, rng) for _ in range(2000)]
    assert 120 < asked.count(None) < 280
    assert asked.count("a0") > 1.5 * asked.count("a1")


class Echo:
    """An engine that gives a request all of its tokens at once, when `callers` have asked."""

    def __init__(self, callers: int):
        self.model_info = SimpleNamespace(vocab_size=100)
        self.callers, self.waiting, self.names, self.most = callers, [], [], 0
        self.fills = True  # one is asked for at a time

    def submit(self, prompt, name, sampling, on_output):
        self.names.append((name, sampling.max_tokens))
        self.waiting.append((sampling.max_tokens, on_output))
        self.most = max(self.most, len(self.waiting))
        if self.fills or len(self.waiting) == self.callers:
            tokens, first = self.waiting.pop(0)
            first(SimpleNamespace(token_ids=[7] * tokens, finish_reason="length", error=None))


def test_callers_ask_again_when_they_are_answered():
    """The host's adapters come first, then as many requests are open as there are callers."""
    case = bench.Case(on_host=2, callers=8, requests=10, answer=30)
    engine = Echo(case.callers)
    crowd = crowd_.Crowd(engine, ["a0", "a1", "a2"], case, random.Random(0))
    crowd.fill()
    assert engine.names == [("a1", 1), ("a0", 1)]
    engine.fills = False
    crowd.begin()
    figures = crowd.round()
    assert figures["tokens_per_s"] > 0
    lengths = [tokens for _, tokens in engine.names[2:]]
    assert len(lengths) == 8 + 8 + 10
    assert engine.most == case.callers
    assert len({*lengths[:8]}) > 4  # so rows do not begin and end together
    assert {*lengths[8:]} == {30}


def test_an_answer_that_failed_ends_the_run():
    crowd = crowd_.Crowd(Echo(1), ["a0"], bench.Case(on_host=1), random.Random(0))
    crowd.fill()
    crowd._ask("a0", 3)
    crowd._open.copy().pop().error = "no room"
    with pytest.raises(RuntimeError, match="A request of a0 failed: no room"):
        crowd.end()
