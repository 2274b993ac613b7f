"""The actor that starts one role's process on its host, and ends with it.

Ray makes an actor of its own of the class, a node's agent has one for each start. It imports
neither jax nor ray.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.api.config import EngineConfig
from serving.runtime.about import about_of
from serving.runtime.child_process import is_at_work

AUTH = "RAY_AUTH_MODE"


class RoleActor:
    """Several calls may be under way; `run` lasts as long as the process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._lock = threading.Lock()

    def about(self, config: EngineConfig) -> dict[str, Any]:
        """Return what must be equal on all hosts, or {"why": ...} where that cannot be read."""
        try:
            return about_of(config) | {AUTH: os.environ.get(AUTH, "")}
        except OSError as error:
            return {"why": str(error)}

    def free_port(self, address: str) -> int:
        """Return a TCP port of the address on which nobody listens at the moment."""
        with socket.socket() as sock:
            sock.bind((address, 0))
            return sock.getsockname()[1]

    def sees(self, path: str, content: bytes) -> bool:
        """Return whether a file is here, with this content."""
        try:
            return Path(path).read_bytes() == content
        except OSError:
            return False

    def run(self, payload: bytes, environ: Mapping[str, str]) -> int:
        """Run the process that the payload tells what to do; return its exit status.

        `environ` is set in it beside the host's own environment.
        """
        command = [sys.executable, "-m", "serving.cluster.far.member"]
        with self._lock:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, env={**os.environ, **environ}
            )
            self._process = process
            if self._is_killed:
                process.kill()
        assert process.stdin is not None
        try:
            process.stdin.write(payload)
            process.stdin.flush()
        except BrokenPipeError:  # it has ended already
            pass
        try:
            return process.wait()
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def kill(self) -> None:
        """End the process at once; one that runs later ends too."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    @property
    def has_ended(self) -> bool:
        """True if the process has run and ended."""
        return self._process is not None and self._process.returncode is not None

    def join(self, limit_s: float) -> None:
        """Wait for the end of a process that was killed, and of its hold on files and GPUs."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)

    def pid(self) -> int:
        """Return the process's number on this host, 0 before it runs."""
        return 0 if self._process is None else self._process.pid

    def is_at_work(self) -> bool:
        """Return whether a thread of the process computes."""
        return self._process is not None and is_at_work(self._process.pid)
