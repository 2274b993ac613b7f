"""Processes of an agent: modules that it starts, and the zygote, which it forks. No jax."""

import contextlib
import logging
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from lora_jax.memory.wire import (
    ShareError,
    is_readable,
    receive_header,
    send_fds,
    send_header,
)

logger = logging.getLogger(__name__)

_END_S = 10.0  # for a process to leave by itself
_LEAVE_S = 30.0  # for a function to leave, which has 20 s of its own for it
_LOOK_S = 1.0  # between two looks at a process that says nothing
_STOPPED_LOOKS = 10  # at a stopped process, one behind the other, and it is given up
_SILENT_S = 600.0  # that a process may say nothing: it imports, compiles, or builds an engine
SEND_S = 60.0  # that a process may leave a message unread
# XLA takes most of a GPU's memory at once unless it is told not to: the others need theirs.
# Its own allocator takes twice what it took before each time, the driver's what is asked for.
_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
}
# Names of variables that hold secrets, such as SERVING_API_KEY, but for settings of libraries.
_SECRET = re.compile(
    r"(?:.*_)?(?:KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)(?:_.*)?", re.IGNORECASE
)
_SETTINGS = "JAX_", "XLA_", "LORA_JAX_", "CUDA_", "NVIDIA_"


class Stuck(ConnectionError):
    """A process neither says what it is waited for nor ends."""


class Zygote:
    """The process that functions are forked from; one that has gone is replaced."""

    def __init__(self):
        """Begin to start it; `expect_ready` waits until it has imported everything."""
        self._lock = threading.Lock()
        self._closed = False
        self._process, self._control = spawn("serving.functions.zygote_process")

    @property
    def pid(self) -> int:
        """Process id of the zygote."""
        return self._process.pid

    def expect_ready(self) -> None:
        """Wait until it can fork. Raises ConnectionError where it has ended."""
        with self._lock:
            expect(self._control, "ready", self.pid)

    def fork(self, order: dict[str, Any]) -> tuple[socket.socket, int]:
        """Return the connection and the process id of a new function.

        Each attempt has a connection of its own: a zygote that ended behind its fork may have left
        a child, which reads its connection's end. A zygote that is stopped or silent is ended, so
        that others wait for a bounded time. Raises OSError where neither this zygote nor a new one
        forks.
        """
        with self._lock:
            for attempt in range(2):
                ours, theirs = socket.socketpair()
                bound_sends(ours)
                try:
                    with theirs:
                        send_header(self._control, {"fork": True, **order})
                        send_fds(self._control, [theirs.fileno()])
                    await_message(self._control, self.pid)
                    return ours, receive_header(self._control)["pid"]
                except OSError as error:
                    ours.close()
                    if attempt or self._closed:
                        raise
                    self._replace(error)
        raise AssertionError("unreachable")

    def _replace(self, error: OSError) -> None:
        """Start another one in the place of one that has ended, or that is stuck."""
        self._control.close()
        if is_stuck(error):
            logger.error("The zygote is ended, and another one is started: %s", error)
            self._process.kill()
        end_process(self._process)
        self._process, self._control = spawn("serving.functions.zygote_process")
        expect(self._control, "ready", self.pid)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """End it; a fork under way is waited for, and none begins."""
        self._closed = True
        with self._lock:
            self._control.close()
            end_process(self._process)


class Ends:
    """Ends of forked processes, which are nobody's children here; any thread may call.

    A process is known by its connection and held by a descriptor: process ids are used again.
    """

    def __init__(self):
        """Know no process."""
        self._fds: weakref.WeakKeyDictionary[socket.socket, int] = weakref.WeakKeyDictionary()

    def note(self, connection: socket.socket, pid: int) -> None:
        """Hold a process until its connection is forgotten here."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            return
        except OSError as error:
            logger.warning("The end of process %d cannot be waited for: %s", pid, error)
            return
        self._fds[connection] = fd
        weakref.finalize(connection, os.close, fd)

    def wait(self, connections: Iterable[socket.socket], timeout_s: float = _END_S) -> None:
        """Return when the processes of closed connections have ended; kill those that stay."""
        fds = [fd for one in connections if (fd := self._fds.get(one)) is not None]
        until = time.monotonic() + timeout_s
        for fd in fds:
            if not _ends_by(fd, until):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                _ends_by(fd, time.monotonic() + _END_S)

    def kill(self, connection: socket.socket) -> None:
        """End a process at once."""
        if (fd := self._fds.get(connection)) is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def see_off(self, name: str, pid: int, connection: socket.socket) -> None:
        """Kill a process whose connection has ended if it does not leave; do not wait for that."""
        fd = self._fds.get(connection)
        if fd is None or _ends_by(fd, 0.0):
            return

        def watch() -> None:
            if not _ends_by(fd, time.monotonic() + _LEAVE_S):
                logger.error("Process %d of %r has not left and is killed.", pid, name)
                self.kill(connection)

        threading.Thread(target=watch, name=f"end-{pid}", daemon=True).start()


def _ends_by(process: int, until: float) -> bool:
    """Return whether a process, by its descriptor, ends before this time (time.monotonic)."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an agent's process: none by whose name it is a secret."""
    kept = {n: v for n, v in given.items() if n.startswith(_SETTINGS) or not _SECRET.fullmatch(n)}
    return {**_ENVIRONMENT, **kept}


def spawn(module: str) -> tuple[subprocess.Popen, socket.socket]:
    """Start a module as a process; return it with our end of its only connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        end = theirs.fileno()
        try:
            bound_sends(ours)
            command = [sys.executable, "-m", module, str(end)]
            process = subprocess.Popen(command, pass_fds=[end], env=environment(os.environ))
        except BaseException:
            ours.close()
            raise
    return process, ours


def bound_sends(connection: socket.socket) -> None:
    """Have sends on a connection, which stays blocking, fail when nobody reads for SEND_S."""
    seconds = int(SEND_S)
    wait = struct.pack("@ll", seconds, int((SEND_S - seconds) * 1e6))  # a timeval
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)


def is_stuck(error: BaseException) -> bool:
    """Return whether an error is one of a process that neither reads, writes nor ends."""
    return isinstance(error, Stuck | BlockingIOError)


def await_message(connection: socket.socket, pid: int, silent_s: float = _SILENT_S) -> None:
    """Return when a message, or the other side's end, can be read.

    Raises Stuck for a process that is stopped (SIGSTOP) for _STOPPED_LOOKS looks, and for one that
    says nothing for `silent_s`. Looks are counted: all processes may have been stopped together.
    """
    stopped, until = 0, time.monotonic() + silent_s
    while not is_readable(connection, _LOOK_S):
        stopped = stopped + 1 if _is_stopped(pid) else 0
        if stopped >= _STOPPED_LOOKS:
            raise Stuck(f"process {pid} is stopped (SIGSTOP)")
        if time.monotonic() > until:
            raise Stuck(f"process {pid} has said nothing for {silent_s:g} s")


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):  # it has ended
        return False


def expect(
    connection: socket.socket, key: str, pid: int, silent_s: float = _SILENT_S
) -> dict[str, Any]:
    """Return the next message of this process, which has `key`.

    Raises ValueError with the other side's reason. Where the process has ended, or says that
    another try may succeed, it is ConnectionError; Stuck as `await_message`.
    """
    await_message(connection, pid, silent_s)
    try:
        answer = receive_header(connection)
    except TimeoutError as error:
        raise Stuck(f"process {pid} has sent only a part of a message") from error
    except (ShareError, ConnectionResetError) as error:
        raise ConnectionError(f"A process ended before it was ready: {error}.") from error
    if key not in answer:
        text = answer.get("error", f"unexpected answer {answer}")
        raise ConnectionError(text) if answer.get("retryable") else ValueError(text)
    return answer


def end_process(process: subprocess.Popen) -> None:
    """Wait for a process whose connection is closed; kill it if it does not leave."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
