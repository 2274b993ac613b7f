"""The handle of a role's process that an actor of Ray has started on its host."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from serving.runtime.child_process import AbstractFarProcess

_KILL_S = 2.0  # for the news of an end that was asked for; then the host counts as lost
_ANSWER_S = 1.0


class RayProcess(AbstractFarProcess):
    """One start of a role; Ray is asked to start it, to watch it and to kill it."""

    def __init__(
        self,
        actor: Any,
        payload: bytes,
        environ: Mapping[str, str],
        ended: Callable[[bool], None],
    ):
        """`ended` is told once whether the host was lost, before `join` returns."""
        self._actor, self._payload, self._environ = actor, payload, environ
        self._told: Callable[[bool], None] | None = ended
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._read, self._write = os.pipe()
        self._is_closed = False

    @property
    def sentinel(self) -> int:
        """See AbstractFarProcess. Raises ValueError for a closed handle."""
        if self._is_closed:
            raise ValueError("the handle of the process is closed")
        return self._read

    def start(self) -> None:
        """See AbstractFarProcess."""
        running = self._actor.run.remote(self._payload, self._environ)
        threading.Thread(target=self._watch, args=(running,), name="watch", daemon=True).start()

    def join(self, timeout: float | None = None) -> None:
        """See AbstractFarProcess."""
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        """See AbstractFarProcess."""
        return not self._ended.is_set()

    def kill(self) -> None:
        """See AbstractFarProcess. Its actor ends, and the kernel ends it with that."""
        threading.Thread(target=self._kill, name="kill", daemon=True).start()

    def is_at_work(self) -> bool:
        """See AbstractFarProcess."""
        try:
            return ray.get(self._actor.is_at_work.remote(), timeout=_ANSWER_S)
        except RayError:
            return False

    def close(self) -> None:
        """See AbstractFarProcess."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._end_actor()
        os.close(self._read)

    def _watch(self, running: Any) -> None:
        try:
            status: Any = ray.get(running)
        except RayError:
            status = -signal.SIGKILL
        self._finish(status, False)

    def _kill(self) -> None:
        self._end_actor()
        if not self._ended.wait(_KILL_S):
            self._finish(-signal.SIGKILL, True)

    def _end_actor(self) -> None:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)

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
