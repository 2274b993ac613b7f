"""Pulses between a process and the one that started it, over a connection of their own. No jax."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
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
        end_s = time.monotonic() + limit_s
        with contextlib.suppress(EOFError, OSError, ValueError):
            if self._asked - self._heard < _MOST_AHEAD:
                self._asked += 1
                self._connection.send_bytes(b"%d" % self._asked)
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


def wait_alive(
    child: AbstractChild,
    name: str,
    pulses: Pulses,
    is_there: Callable[[float], bool],
    limit_s: float,
) -> bool:
    """Return whether `is_there`, given seconds to wait for it, says so in time.

    A process that neither answers pulses nor computes is hung: it is killed. Raises ConnectionError
    then.
    """
    end_s, silent = time.monotonic() + limit_s, 0
    while (left_s := end_s - time.monotonic()) > 0:
        if is_there(min(left_s, _LOOK_S)):
            return True
        silent = 0 if pulses.answered(_LOOK_S) else silent + 1
        if silent >= _SILENT_LOOKS and not child.is_at_work():
            logger.error("%s hangs while it starts; it is killed.", name)
            with contextlib.suppress(ValueError):  # closed meanwhile
                child.kill()
            raise ConnectionError(f"{name} hangs.")
    return is_there(0.0)
