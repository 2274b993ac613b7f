"""The handle of a role's process that an actor has started on its host."""

import abc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from serving.runtime.child_process import AbstractFarProcess

_KILL_S = 2.0  # for the news of an end that was asked for; then the host counts as lost


class AbstractActorProcess(AbstractFarProcess):
    """One start of a role by an actor, which is asked to start it, to watch it and to kill it."""

    def __init__(self, ended: Callable[[bool], None]):
        """`ended` is told once whether the host was lost, before `join` returns."""
        self._told: Callable[[bool], None] | None = ended
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._read, self._write = os.pipe()
        self._is_closed = False

    @abc.abstractmethod
    def _begin(self) -> Any:
        """Ask the actor to run the process; return what `_status` waits for."""

    @abc.abstractmethod
    def _status(self, running: Any) -> int:
        """Return the process's exit status at its end, -SIGKILL of an actor that has gone."""

    @abc.abstractmethod
    def _end_actor(self) -> None:
        """End the actor, and with it the process; one that has gone is not missed."""

    @property
    def sentinel(self) -> int:
        """See AbstractFarProcess. Raises ValueError for a closed handle."""
        if self._is_closed:
            raise ValueError("the handle of the process is closed")
        return self._read

    def start(self) -> None:
        """See AbstractFarProcess."""
        running = self._begin()
        threading.Thread(target=self._watch, args=(running,), name="watch", daemon=True).start()

    def join(self, timeout: float | None = None) -> None:
        """See AbstractFarProcess."""
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        """See AbstractFarProcess."""
        return not self._ended.is_set()

    def kill(self) -> None:
        """See AbstractFarProcess."""
        threading.Thread(target=self._kill, name="kill", daemon=True).start()

    def close(self) -> None:
        """See AbstractFarProcess."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._end_actor()
        os.close(self._read)

    def _watch(self, running: Any) -> None:
        status = -signal.SIGKILL  # where nothing can be learnt of it any more
        try:
            status = self._status(running)
        finally:
            self._finish(status, False)

    def _kill(self) -> None:
        self._end_actor()
        if not self._ended.wait(_KILL_S):
            self._finish(-signal.SIGKILL, True)

    def _finish(self, status: int, is_lost: bool) -> None:
        with self._lock:
            told, self._told = self._told, None
            if told is None:
                return
            self.exitcode = status
        try:
            told(is_lost)  # first: who waits for the end may start on this host again
        finally:
            self._ended.set()
            os.close(self._write)
