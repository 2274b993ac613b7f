"""A step's line has its clock, its kernels and its limit, and the steps run."""

import argparse

import pytest

from bench import step_limits
from bench.decode_step import TINY
from bench.end_to_end.limits import Card
from bench.parallel.shapes import SPEED, tiny


def test_a_line_has_the_clock_its_kernels_and_what_is_between():
    row = step_limits.as_row(2.0, {"a": (3, 1200.0), "b": (1, 300.0)}, 0.5)
    assert row["kernels_ms"] == 1.5
    assert row["between_ms"] == 0.5
    assert row["launches"] == 4
    assert row["limit_over_ms"] == 0.25
    assert list(row["kernels"]) == ["a", "b"]


def test_what_is_not_known_is_said_so():
    row = step_limits.as_row(2.0, {}, None)
    unknown = "kernels_ms", "between_ms", "limit_ms", "limit_over_ms"
    assert all(row[name] is None for name in unknown)


def test_a_command_without_steps_is_refused(capsys):
    with pytest.raises(SystemExit):
        step_limits.parse(["--rows", "--prompts", "0", "--out", "x"])
    assert "--rows or --prompts must name a step" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("adapters", [False, True])
def test_steps_of_both_kinds_run_with_the_program_of_an_engine(adapters):
    raw = tiny(SPEED["qwen3-30b-a3b"]) | {"num_experts": TINY["num_experts"]}
    given = {"rows": [1, 20], "position": 30, "prompts": 2, "prompt": 16, "room": 0}
    args = argparse.Namespace(**given, adapters=adapters)
    steps = step_limits.make_steps(raw, args, Card(1e9, 1e9))
    base = [step for step in steps if not step.lora]
    assert [step.name for step in base] == ["1 rows", "20 rows", "2 prompts of 16"]
    assert [step.program.bucket for step in base] == [8, 20, 32]
    mixed = [step.name for step in steps if step.program.lora]
    assert mixed == [f"{step.name}, 8 adapters" for step in base if adapters]
    assert all(step.limit_ms > 0 for step in steps)
    row = step_limits.measure(steps[adapters], profiled=False)
    assert row["ms"] > 0
    assert len(row["turns_ms"]) > 1
