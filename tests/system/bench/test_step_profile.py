"""A step's kernels, from a session of the profiler."""

import contextlib
import tempfile
import types

import jax
import jax.numpy as jnp
import pytest

from bench import step_profile


def line(name, *events):
    made = [types.SimpleNamespace(name=n, start_ns=s, duration_ns=d) for n, s, d in events]
    return types.SimpleNamespace(name=name, events=made)


def test_kernels_count_for_the_turn_that_they_began_in(monkeypatch, tmp_path):
    """Turns of two steps: `one` forwards, then backwards, three launches of each in a turn."""
    turns = [(f"{step_profile._TURN}{n}", 1000.0 * n, 900.0) for n in range(4)]
    kernels = [("shared", 1000.0 * n + 100 * i, 3e3 * (n + 1)) for n in range(4) for i in range(3)]
    planes = [
        types.SimpleNamespace(name="/host:CPU", lines=[line("python", *turns, ("step", 5.0, 1.0))]),
        types.SimpleNamespace(
            name="/device:GPU:0",
            lines=[
                line("Stream #7(Kernel)", *reversed(kernels), ("late", 3950.0, 6e3)),
                line("XLA Ops", ("shared", 10.0, 1e9)),
            ],
        ),
    ]
    (tmp_path / "a.xplane.pb").touch()
    data = types.SimpleNamespace(from_file=lambda file: types.SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", data)
    found = step_profile._kernels(tmp_path, 4)
    assert [turn["shared"] for turn in found] == [(1, 3 * (n + 1)) for n in range(4)]
    assert [turn.get("late") for turn in found] == [None, None, None, (1 / 3, 2)]


def test_a_span_is_from_the_first_kernel_to_the_end_of_the_last(monkeypatch, tmp_path):
    """Copies do not count; kernels that overlap count once in the span, each in the sum."""
    lines = [
        line("Stream #1(Kernel)", ("a", 2e6, 3e6), ("b", 4e6, 5e6), ("MemcpyH2D", 0.0, 2e6)),
        line("XLA Ops", ("a", 0.0, 1e9)),
    ]
    planes = [types.SimpleNamespace(name="/device:GPU:0", lines=lines)]
    (tmp_path / "a.xplane.pb").touch()
    data = types.SimpleNamespace(from_file=lambda file: types.SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", data)
    monkeypatch.setattr(jax.profiler, "trace", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext(tmp_path))
    assert step_profile.device_span(lambda: None) == (7.0, 8.0)
    planes.clear()
    assert step_profile.device_span(lambda: None) is None


def test_every_step_runs_in_every_turn_and_there_and_back():
    ran = []

    def step(name):
        ran.append(name)
        return jnp.zeros(())

    found = step_profile.profile_in_turn(
        {name: lambda name=name: step(name) for name in ("one", "two")}, 2
    )
    assert found == {"one": [{}, {}], "two": [{}, {}]}  # a CPU has no kernels
    order = ["one", "two", "two", "one"]
    assert ran == ["one", "two", *(name for name in order for _ in range(step_profile.STEPS))]


def test_kinds_are_added_up():
    kernels = {"grouped_matmul_8": (2.0, 30.0), "attend": (1.0, 10.0), "MemcpyD2D": (4.0, 1.7)}
    said = step_profile.show_profile("8 rows", kernels)
    assert "8 rows: 42 us of kernels" in said
    lines = [text.split() for text in said.splitlines()[1:4]]
    assert [(words[0], float(words[1])) for words in lines] == [
        ("experts", 30.0),
        ("attention", 10.0),
        ("copies", pytest.approx(1.7)),
    ]
