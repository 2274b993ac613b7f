"""Watches one child process: an ended one is replaced, a hung one is killed first. No jax.

A process is hung when it does not answer and does nothing: it is stopped, or all of its threads
sleep. One that computes is given more time, since a busy machine must not make it a dead one.
"""

import contextlib
import logging
import multiprocessing.connection
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from serving.runtime.child_process import AbstractChild, Pulse

logger = logging.getLogger(__name__)

_LOOK_S = 0.4  # between two questions
_ANSWER_S = 2.0  # for an answer; with the above, a hung process is found within 3 s
_BUSY_S = 30.0  # a process that computes may be silent for so long
_UNWELL_S = 40.0  # and one that answers that it takes no requests


class Keeper:
    """A thread that keeps one role there."""

    def __init__(
        self,
        name: str,
        current: Callable[[], AbstractChild],
        replace: Callable[[AbstractChild], None],
        closing: threading.Event,
        set_up: Callable[[bool], None] = lambda up: None,
    ):
        """Start. `replace` puts another process in the place of an ended one, and may block.

        `set_up` is told after each question whether the role is there.
        """
        self._name, self._current, self._replace = name, current, replace
        self._closing, self._set_up = closing, set_up
        self.is_up = True
        self._well_s = self._heard_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"keeper of {name}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended, as it does when `closing` is set."""
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            child = self._current()
            if has_ended(child, _LOOK_S):
                if not self._closing.is_set():
                    self._rescue(child)
            elif child.is_ready and not self._closing.is_set():
                self._judge(child, child.pulse(_ANSWER_S))

    def _rescue(self, dead: AbstractChild) -> None:
        self._tell(False)
        try:
            self._replace(dead)
        except Exception:  # no memory, no descriptor: perhaps there is some later
            logger.exception("%s could not be replaced.", self._name.capitalize())
            self._closing.wait(_LOOK_S)
        self._well_s = self._heard_s = time.monotonic()

    def _judge(self, child: AbstractChild, pulse: Pulse) -> None:
        now = time.monotonic()
        if pulse is not Pulse.SILENT:
            self._heard_s = now
        if pulse is Pulse.UP:
            self._well_s = now
        self._tell(pulse is Pulse.UP)
        if pulse is Pulse.UP or has_ended(child, 0):
            return
        silent, unwell = now - self._heard_s, now - self._well_s
        if pulse is Pulse.SILENT and silent < _BUSY_S and child.is_at_work():
            logger.warning("%s has been silent for %.1f s and computes.", self._name, silent)
            return
        if pulse is Pulse.SILENT or unwell > _UNWELL_S:
            symptom = "hangs" if pulse is Pulse.SILENT else f"has been unwell for {unwell:.0f} s"
            logger.error("%s %s; it is killed and replaced.", self._name.capitalize(), symptom)
            with contextlib.suppress(ValueError):  # closed meanwhile
                child.kill()

    def _tell(self, is_up: bool) -> None:
        self.is_up = is_up
        self._set_up(is_up)


def end_keepers(keepers: Sequence[Keeper], children: Callable[[], Iterable[AbstractChild]]) -> None:
    """Wait for keepers whose `closing` is set; a process that is still starting is killed."""
    for keeper in keepers:
        for child in children():
            if not child.is_ready:  # its keeper waits for it
                with contextlib.suppress(ValueError):
                    child.kill()
        keeper.join()


def has_ended(child: AbstractChild, wait_s: float) -> bool:
    """Return whether the process has ended, waiting so long for that."""
    try:
        return bool(multiprocessing.connection.wait([child.sentinel], wait_s))
    except ValueError:  # its handle is closed
        return True
