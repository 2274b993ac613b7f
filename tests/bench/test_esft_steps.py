"""Steps beside one another: what a pair differs by, and what a sample counts."""

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
            "low %": 1.0,
            "high %": 5.0,
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


def test_steps_take_turns_and_their_experts_are_counted(monkeypatch):
    ran = []

    def sample(step, steps):
        ran.append((step.name, steps))
        return (1e4, 1.0) if steps == 4 else (float(len(ran)), 7.0)

    class Step:
        def __init__(self, name, sizes):
            self.name, self.sizes = name, sizes

        def __call__(self):
            return [jnp.asarray(size, jnp.int32) for size in self.sizes]

    monkeypatch.setattr(esft_steps, "_sample", sample)
    steps = {"a": Step("a", ([0, 2, 1], [1, 0, 0])), "b": Step("b", ([1, 1, 1], [1, 1, 0]))}
    took = in_turn(steps, samples=3, profiles=0)
    assert ran == [("a", 4), ("b", 4), *((name, 15) for name in "abbaab")]
    assert took["a"] == Took([3.0, 6.0, 7.0], [], 3.0, 7.0)
    assert took["b"] == Took([4.0, 5.0, 8.0], [], 5.0, 7.0)
