"""Steps beside one another: what a pair differs by, and what a sample counts."""

import gc

import jax.numpy as jnp
import pytest

from bench import esft_steps
from bench.esft_steps import Took, in_turn


def test_a_difference_is_the_median_of_pairs():
    base = Took([100.0, 200.0, 400.0], [90.0, 180.0, 360.0], 3.0, 5.0)
    mine = Took([101.0, 206.0, 420.0], [90.0, 181.8, 360.0], 3.0, 5.0)
    assert mine.us == 206.0
    assert mine.over(base) == pytest.approx(
        {
            "over %": 3.0,
            "low %": 2.0,
            "high %": 4.0,
            "kernels over %": 0.0,
            "kernels us": 181.8,
            "base kernels us": 180.0,
        }
    )
    without = Took([101.0, 206.0, 420.0], [], 3.0, 5.0)
    assert "kernels us" not in without.over(base)


def test_the_first_steps_of_a_sample_do_not_count(monkeypatch):
    """A clock that stands still but in steps: the first three take 1000 s each, others 2 s."""
    clock, calls = [0.0], [0]
    monkeypatch.setattr(esft_steps.time, "perf_counter", lambda: clock[0])

    def step():
        calls[0] += 1
        clock[0] += 1000 if calls[0] <= 3 else 2
        return [jnp.full(4, calls[0], jnp.int32)]

    us, sent = esft_steps._sample(step, 10)
    assert us == pytest.approx(2e6)
    assert sent > us
    assert calls[0] == 1 + esft_steps._UNCOUNTED + 10 + 1


class Step:
    def __init__(self, name, *sizes):
        self.name, self.sizes = name, sizes

    def __call__(self):
        return [jnp.asarray(size, jnp.int32) for size in self.sizes]


def sampled(monkeypatch, us):
    """Let every sample say that a step takes so long; return what is asked for."""
    asked = []

    def sample(step, steps):
        asked.append((step.name, steps, gc.isenabled()))
        return us, float(len(asked))

    monkeypatch.setattr(esft_steps, "_sample", sample)
    return asked


def test_steps_take_turns_and_their_experts_are_counted(monkeypatch):
    asked = sampled(monkeypatch, 1e4)
    steps = {
        "a": Step("a", [0, 2, 1], [1, 0, 0]),
        "b": Step("b", [1, 1, 1], [1, 1, 0]),
    }
    took = in_turn(steps, samples=3, profiles=0)
    first, turns = asked[:2], asked[2:]
    assert first == [("a", 2, True), ("b", 2, True)]
    assert turns == [(name, 6, False) for name in "abbaab"]
    assert gc.isenabled()
    assert took["a"] == Took([1e4] * 3, [], 3.0, 6.0)
    assert took["b"] == Took([1e4] * 3, [], 5.0, 5.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("us", "samples"),
    [(1e3, 21), (2e4, 12), (1e5, 5)],
)
def test_long_steps_are_sampled_less(monkeypatch, us, samples):
    sampled(monkeypatch, us)
    assert len(in_turn({"a": Step("a", [1])}, profiles=0)["a"].clock) == samples
