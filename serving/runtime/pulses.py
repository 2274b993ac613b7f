"""Pulses between a process and the one that started it, over a connection of their own. No jax."""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

from serving.runtime.child_process import AbstractChild

logger = logging.getLogger(__name__)

_MOST_AHEAD = 64  # questions of which a process has answered none: more might fill the connection
_LOOK_S = 0.5  # for what is waited for, and for the answer to a pulse
_SILENT_LOOKS = 10  # after which a process that starts, and computes nothing, is hung: 10 s


class Pulses:
    """The side that asks; one thread at a time uses it."""

    def __init__(self, connection: Connection):
        """Own the connection."""
        self._connection = connection
        self._asked = self._heard = 0

    def answered(self, limit_s: float) -> bool:
        """Ask, and return whether the answer comes in time.

        One to an earlier question does not count.
        """
        self.ask()
        return self.has_heard(limit_s)

    def ask(self) -> None:
        """Ask, unless too many questions wait for their answers."""
        with contextlib.suppress(OSError, ValueError):
            if self._asked - self._heard < _MOST_AHEAD:
                self._asked += 1
                self._connection.send_bytes(b"%d" % self._asked)

    def has_heard(self, limit_s: float) -> bool:
        """Return whether the answer to the last question comes in time."""
        end_s = time.monotonic() + limit_s
        with contextlib.suppress(EOFError, OSError, ValueError):
            while self._connection.poll(max(0.0, end_s - time.monotonic())):
                self._heard = int(self._connection.recv_bytes())
                if self._heard == self._asked:
                    return True
        return False

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class Echo:
    """The side that answers, on a thread: the process is not stopped, and its interpreter runs."""

    def __init__(self, connection: Connection, leave: Callable[[], None]):
        """Start. `leave` removes what the process would leave behind when it ends at once."""
        self._connection, self._leave = connection, leave
        self._lock = threading.Lock()
        self._has_ended = self._is_keeping = False
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    @contextlib.contextmanager
    def ending_the_process(self) -> Iterator[None]:
        """Let the process end at once, with status 1, when the other side has gone.

        For what may take long, or for ever, and hears of no end.
        """
        self._keep(True)
        try:
            yield
        finally:
            self._keep(False)

    def _keep(self, keeps: bool) -> None:
        with self._lock:
            self._is_keeping = keeps
            self._end_if_due()

    def _run(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._connection.send_bytes(self._connection.recv_bytes())
        with self._lock:
            self._has_ended = True
            self._end_if_due()

    def _end_if_due(self) -> None:
        if self._has_ended and self._is_keeping:
            try:
                self._leave()
            finally:  # also where something could not be removed
                os._exit(1)


class Hung(ConnectionError):
    """A process hangs while it starts; it was killed."""


@dataclasses.dataclass(eq=False)
class Starting:
    """A process that starts, among those that are waited for together."""

    child: AbstractChild
    name: str
    pulses: Pulses
    silent: int = 0  # looks in a row

    def hangs(self) -> bool:
        """Return whether it has not answered for long, and does not compute."""
        return self.silent >= _SILENT_LOOKS and not self.child.is_at_work()


def wait_alive(
    processes: Sequence[Starting], is_there: Callable[[float], bool], limit_s: float
) -> bool:
    """Return whether `is_there`, given seconds to wait for it, says so in time.

    A process that neither answers pulses nor computes is hung: it is killed. Raises Hung then.
    """
    end_s = time.monotonic() + limit_s
    while (left_s := end_s - time.monotonic()) > 0:
        if is_there(min(left_s, _LOOK_S)):
            return True
        _look(processes)
        if hung := next((process for process in processes if process.hangs()), None):
            logger.error("%s hangs while it starts; it is killed.", hung.name)
            with contextlib.suppress(ValueError):  # closed meanwhile
                hung.child.kill()
            raise Hung(f"{hung.name} hangs while it starts.")
    return is_there(0.0)


def _look(processes: Sequence[Starting]) -> None:
    """Ask all processes, and count those that do not answer within one wait for all of them."""
    for process in processes:
        process.pulses.ask()
    end_s = time.monotonic() + _LOOK_S
    for process in processes:
        heard = process.pulses.has_heard(max(0.0, end_s - time.monotonic()))
        process.silent = 0 if heard else process.silent + 1
