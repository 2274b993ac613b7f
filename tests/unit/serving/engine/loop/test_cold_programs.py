"""Programs that have not run: without turns at once, else in a turn that nobody else wants."""

from types import SimpleNamespace

import pytest

from serving.engine.loop import cold_programs
from serving.engine.loop.cold_programs import run_cold


class Runner:
    def __init__(self, programs):
        self.left, self.order = programs, []

    @property
    def has_cold(self):
        return self.left > 0

    def run_cold(self):
        self.order.append("run")
        self.left = max(self.left - 1, 0)
        return self.left > 0


def turns(runner, is_free):
    """Turns of a device that is free, or is not before `woken` says that there is work."""

    def take_idle(woken):
        runner.order.append("asked")
        while not (is_free or woken()):
            pass
        return is_free

    return SimpleNamespace(take_idle=take_idle, give_back=lambda: runner.order.append("back"))


def test_without_turns_a_program_runs_at_once():
    runner = Runner(2)
    assert run_cold(runner, None, lambda: False)
    assert not run_cold(runner, None, lambda: False)
    assert runner.order == ["run", "run"]


def test_a_turn_is_asked_for_while_a_program_is_left_and_given_back():
    runner = Runner(1)
    free = turns(runner, True)
    assert not run_cold(runner, free, lambda: False)
    assert not run_cold(runner, free, lambda: False)
    assert runner.order == ["asked", "run", "back", "run"]


def test_work_and_a_busy_device_end_the_wait_without_a_turn(monkeypatch):
    runner = Runner(1)
    busy = turns(runner, False)
    assert run_cold(runner, busy, lambda: True)
    monkeypatch.setattr(cold_programs, "_ASKS_S", 0.01)
    assert run_cold(runner, busy, lambda: False)
    assert runner.order == ["asked", "asked"]


def test_a_program_that_fails_gives_the_turn_back(monkeypatch):
    runner = Runner(1)

    def fail():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "run_cold", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_cold(runner, turns(runner, True), lambda: False)
    assert runner.order == ["asked", "back"]
