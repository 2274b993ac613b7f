"""Runs of programs on nothing that a lazy start left, done while an engine has no work."""

import time
from collections.abc import Callable

from serving.engine.loop.loop_parts import AbstractTurns
from serving.steps.model_runner import ModelRunner

_ASKS_S = 1.0  # for a turn; meanwhile the engine's loop gives no sign of life


def run_cold(runner: ModelRunner, turns: AbstractTurns | None, woken: Callable[[], bool]) -> bool:
    """Run one of them, with `turns` in a turn of its own; return whether any is left.

    Nothing runs where `woken` says that there is work before the turn comes, or it does not come
    within a second.
    """
    if turns is None or not runner.has_cold:
        return runner.run_cold()
    until = time.monotonic() + _ASKS_S
    if not turns.take_idle(lambda: woken() or time.monotonic() > until):
        return True
    try:
        return runner.run_cold()
    finally:
        turns.give_back()
