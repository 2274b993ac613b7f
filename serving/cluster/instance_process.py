"""One LLM instance as a process of its own, and the handle of who started it."""

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection

from serving.cli.options import Options
from serving.cli.serve import Started, StartError, serve
from serving.cluster.node import gang_of
from serving.cluster.server_place import ServerPlace, server_access
from serving.engine import logs
from serving.lora_server.calls import Caller
from serving.runtime import journal
from serving.runtime.child_process import AbstractChild, Pulse
from serving.runtime.gpu_assignment import use_gpu

logger = logging.getLogger(__name__)

_START_S = 600.0  # to load a model and compile, on a slow machine
_END_S = 45.0  # uvicorn lets running requests end
_REPLAY_S = 300.0  # to load all adapters of the journal
BUDGETS = "budgets"  # of keys, beside the sockets
_READY = b"ready "
_REPLAY = b"replay"
_ARE_YOU_READY = b"GET /ready HTTP/1.1\r\nHost: instance\r\nConnection: close\r\n\r\n"


class InstanceProcess(AbstractChild):
    """A running instance; `stop` or the end of this process ends it."""

    def __init__(
        self,
        options: Options,
        number: int,
        path: str,
        place: ServerPlace | None,
        serve_leases: Callable[[str, Connection], object],
    ):
        """Start the process, which will listen at the Unix socket `path`.

        `serve_leases` is given the instance's name and this side of its connection for leases.
        """
        context = multiprocessing.get_context("spawn")
        self._life, life = context.Pipe()
        leases, theirs = context.Pipe() if place is not None else (None, None)
        self.number, self.path = number, path
        self._talking = threading.Lock()
        self.body_bytes = 0  # largest body; known when it is ready
        process = context.Process(
            target=instance_main,
            args=(life, theirs, options, number, path, place),
            name=f"instance-{number}",
            daemon=True,
        )
        super().__init__(process, _END_S)
        life.close()
        if leases is not None and theirs is not None:
            theirs.close()
            serve_leases(f"instance-{number} of process {self.pid}", leases)

    def wait_ready(self) -> None:
        """Return when the instance answers. Raises ConnectionError if it ended instead."""
        try:
            if self._life.poll(_START_S):
                self.body_bytes = int(self._life.recv_bytes().removeprefix(_READY))
                self.is_ready = True
                return
        except (EOFError, OSError, ValueError):
            pass
        raise ConnectionError(f"Instance {self.number} did not start; its log says why.")

    def replay(self) -> dict[str, str]:
        """Let the instance repeat the journal of loads; return what it could not load, and why.

        What it has already is not read again. Raises ConnectionError when it does not answer.
        """
        with self._talking:
            try:
                self._life.send_bytes(_REPLAY)
                if self._life.poll(_REPLAY_S):
                    return json.loads(self._life.recv_bytes())
            except (EOFError, OSError, ValueError):
                pass
        raise ConnectionError(f"Instance {self.number} did not repeat the journal.")

    def pulse(self, limit_s: float) -> Pulse:
        """See AbstractChild: the answer to GET /ready."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(limit_s)
            sock.connect(self.path)
            sock.sendall(_ARE_YOU_READY)
            answer = sock.recv(64)
            if answer:
                return Pulse.UP if answer.startswith(b"HTTP/1.1 200 ") else Pulse.UNWELL
        return Pulse.SILENT

    def hang_up(self) -> None:
        """Close the connection that keeps the process, which then finishes what it does."""
        self._life.close()


def instance_main(
    life: Connection,
    leases: Connection | None,
    options: Options,
    number: int,
    path: str,
    place: ServerPlace | None,
) -> None:
    """Be an instance until the other side of `life` has gone; exit status 1: it cannot start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us closes `life`
    logs.configure(options.log_level)
    devices = options.engine.tensor_parallel_size // options.cluster.nnodes
    use_gpu(number * devices, devices)
    try:
        with ExitStack() as stack:
            orphaned = threading.Event()
            sock = stack.enter_context(_listening(path, orphaned))
            access = None
            if place is not None and leases is not None:
                caller = Caller(leases)
                stack.callback(caller.close)
                access = server_access(place, caller, f"instance-{number} of process {os.getpid()}")
            announce = functools.partial(_announce, life, orphaned=orphaned)
            serve(options, sock, access, gang_of(options), announce=announce)
    except StartError as error:
        logger.error("Instance %d: %s", number, error)
        raise SystemExit(1) from None


def _announce(life: Connection, started: Started, orphaned: threading.Event) -> None:
    """Say that the instance answers, repeat the journal on demand, end with whoever started it."""
    life.send_bytes(_READY + b"%d" % started.body_bytes)

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            while life.recv_bytes() == _REPLAY:
                life.send_bytes(json.dumps(started.replay()).encode())
        orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="life", daemon=True).start()


@contextlib.contextmanager
def _listening(path: str, orphaned: threading.Event):
    """Yield a Unix socket at `path` that only this user can reach.

    Who started us removes the folder; orphaned instances do, the last one.
    """
    folder = os.path.dirname(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(path)
        os.chmod(path, 0o600)
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):  # others are still in the folder, or it has gone
                os.unlink(path)
                left = set(os.listdir(folder)) - {BUDGETS}
                if orphaned.is_set() and all(map(journal.is_ours, left)):
                    shutil.rmtree(os.path.join(folder, BUDGETS), ignore_errors=True)
                    journal.remove(folder)
                os.rmdir(folder)
