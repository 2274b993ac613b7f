"""Watch over a backbone, by a process that is replaced when it ends. No jax.

Pages stay as long as the agent holds their descriptors, so the guard's end stops no function: a
backup maps the same pages and must find the same digests. Bytes that have changed are reported.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from serving.functions.running import Running

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0  # from a failed start to the next
_LONGEST_AGAIN_S = 60.0  # from a failed load of the backbone to the next
_CLOSE_S = 30.0
_LONGEST_CHECK_S = 600.0

Launch = Callable[..., tuple[socket.socket, int, dict[str, Any]]]


class Guard:
    """One guard at a time, on a thread of its own; any thread may call."""

    def __init__(self, launch: Launch, verify_s: float, changed: Callable[[list[str]], None]):
        """Check every `verify_s` seconds and whenever `look` is called.

        `changed` gets the names of arrays whose bytes are not the published ones, on the guard's
        thread; it returns when others are in their place, and is called again where it fails.
        """
        self._launch, self._verify_s, self._changed = launch, verify_s, changed
        self._running: Running | None = None
        self._look, self._closing = threading.Event(), threading.Event()
        self._checked = threading.Condition()
        self.checks = 0  # that found the published bytes
        self.starts = 0  # processes that found the published bytes when they began
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the guard that is ready now."""
        running = self._running
        return None if running is None or running.ended else running.pid

    def look(self) -> None:
        """Have the bytes checked soon."""
        self._look.set()

    def wait_checked(self, count: int, timeout_s: float) -> bool:
        """Return whether `checks` and `starts` together reach the count within the time."""
        with self._checked:
            return self._checked.wait_for(lambda: self.checks + self.starts >= count, timeout_s)

    def close(self) -> None:
        """End the guard."""
        self._closing.set()
        self._look.set()
        if (running := self._running) is not None:
            running.close()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():  # it loads a large backbone, and ends behind that
            logger.warning("The backbone's guard has not ended within %g s.", _CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._guard()
            except Exception as error:  # without this thread nobody looks at the backbone
                if not self._closing.is_set():
                    logger.error("The backbone's guard does not start: %s", error)
                    self._closing.wait(_AGAIN_S)

    def _guard(self) -> None:
        """Start a process and check by it until it ends."""
        connection, pid, ready = self._launch({"name": "guard", "guard": True, "adapter": None})
        self._running = running = Running(connection, pid, ready)
        reading = threading.Thread(target=running.read, name="guard-answers", daemon=True)
        reading.start()
        changed = ready["changed"]
        if not changed:
            self.starts += 1
            self._count(0)
        while not (changed or self._closing.is_set() or running.ended):
            self._look.wait(self._verify_s)
            self._look.clear()
            answers = running.send({"call": "check"})
            answer = {} if answers is None else _answer(answers)
            if "value" not in answer:
                break
            changed = answer["value"]
            self._count(not changed)
        ended = running.ended
        running.close()
        reading.join()
        if changed:
            self._replace(changed)
        elif ended and not self._closing.is_set():
            logger.warning("The backbone's guard has ended; a backup takes its place.")

    def _replace(self, changed: list[str]) -> None:
        """Return when other pages are in the place of those that have changed."""
        wait_s = _AGAIN_S
        while not self._closing.is_set():
            try:
                self._changed(changed)
                return
            except Exception as error:  # whatever it is, functions wait for the next try
                logger.error("The backbone cannot be loaded again, functions stay off: %s", error)
            self._closing.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_AGAIN_S)

    def _count(self, more: int) -> None:
        with self._checked:
            self.checks += more
            self._checked.notify_all()


def _answer(answers: "queue.SimpleQueue[dict[str, Any]]") -> dict[str, Any]:
    with contextlib.suppress(queue.Empty):
        return answers.get(timeout=_LONGEST_CHECK_S)
    return {}
