"""Isolation levels `server` and `none`: one engine for all functions of a backbone. No jax.

The engine has the backbone, the KV pages and the programs. With `server` each adapter is in a
process of its own, a tenant, which has nothing else; descriptors of its channel pass through the
agent once and are closed. On GPUs one process has all adapters (`shared_adapters`). With `none` the
engine reads the adapters.
"""

import contextlib
import itertools
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from lora_jax.memory.wire import close_all, receive_fds
from serving.functions.messages import value_of_start
from serving.functions.running import Running
from serving.functions.shared_adapters import SharedAdapters

logger = logging.getLogger(__name__)

DEFAULTS = {"max_tenants": 16, "wait_s": 2.0}
_SIT_S = 60.0  # for the engine to take a tenant in

Launch = Callable[..., tuple[socket.socket, int, dict[str, Any]]]


class Tenants:
    """The engine and its tenants, as an agent starts them; any thread may call."""

    def __init__(self, launch: Launch, *, apart: bool, shared: SharedAdapters | None = None):
        """`launch(order, backbone=...)` starts a process and returns its socket, pid and report.

        `apart`: each adapter is in a process of its own; with `shared` all are in that one.
        """
        self._launch, self._apart, self._shared = launch, apart, shared
        if shared is not None:
            shared.use(launch, self._end_held)
        self._lock = threading.Lock()
        self._engine: Running | None = None
        self._tenants: set[Tenant] = set()
        self._epochs = itertools.count(1)  # of seats, in all engines' lives
        self._closed = False

    @property
    def engine(self) -> Running | None:
        """The engine's process that is ready now."""
        engine = self._engine
        return None if engine is None or engine.ended else engine

    def start(self, name: str, folder: str | None) -> "Tenant":
        """Return the process of an adapter, taken in by the engine; of the base the engine alone.

        Raises ValueError for an adapter that cannot be served, DeviceFull where there is no room
        for it now, and another ConnectionError where one of the processes ends.
        """
        engine = self._running_engine()
        if folder is None:
            return self._keep(Tenant(engine, name, None, None, engine.pid, dict(engine.about)))
        epoch = next(self._epochs)
        if self._shared is not None:
            return self._start_shared(self._shared, engine, name, folder, epoch)
        if not self._apart:
            call = {"call": "load", "name": name, "folder": folder}
            _taken_in(name, engine.send(call))
            about = dict(engine.about) | {"epoch": epoch}
            return self._keep(Tenant(engine, name, name, None, engine.pid, about))
        order = {"name": name, "adapter": folder, "last_epoch": epoch, **engine.about["tenants"]}
        connection, pid, ready = self._launch({"tenant": True, **order}, backbone=False)
        try:
            fds = receive_fds(connection, 3)
            try:
                call = {"call": "sit", "name": name, "report": ready["report"]}
                answers = engine.send({**call, "epoch": ready["epoch"]}, fds=fds)
            finally:
                close_all(fds)
            _taken_in(name, answers)
        except BaseException:
            connection.close()
            raise
        about = {"max_model_len": engine.about["max_model_len"], "attach_s": 0.0, **ready}
        return self._keep(Tenant(engine, name, name, connection, pid, about))

    def _start_shared(
        self, shared: SharedAdapters, engine: Running, name: str, folder: str, epoch: int
    ) -> "Tenant":
        """Return an adapter of the process that has all, taken in by the engine."""
        begun = time.monotonic()
        process, life, number, report = shared.load(name, folder, engine.about["tenants"])
        try:
            call = {"call": "sit", "name": name, "report": report, "epoch": epoch}
            _taken_in(name, engine.send(call | {"number": number, "life": life}))
        except BaseException:
            # The engine may take it in yet, after this call has been given up.
            engine.send({"call": "leave", "name": name, "epoch": epoch})
            shared.free(number)
            raise
        about = {"max_model_len": engine.about["max_model_len"], "attach_s": 0.0, "fork_s": 0.0}
        about |= {"private_bytes": report["weight_bytes"], "epoch": epoch}
        about["start_s"] = time.monotonic() - begun
        return self._keep(Tenant(engine, name, name, None, process.pid, about, process))

    def close(self) -> None:
        """End the engine; tenants end with it."""
        with self._lock:
            self._closed, engine = True, self._engine
        if engine is not None:
            engine.close()
        if self._shared is not None:
            self._shared.close()

    def _running_engine(self) -> Running:
        with self._lock:
            if self._engine is None or self._engine.ended:
                if self._closed:
                    raise ConnectionError("The agent is closed.")
                connection, pid, about = self._launch({"name": "engine", "adapter": None})
                self._engine = engine = Running(connection, pid, about)
                engine.on_lost = self._lose
                if self._shared is not None:
                    engine.on_freed = self._shared.free
                threading.Thread(
                    target=self._watch, args=(engine,), name="engine", daemon=True
                ).start()
            return self._engine

    def _keep(self, tenant: "Tenant") -> "Tenant":
        with self._lock:
            self._tenants = {t for t in self._tenants if not t.ended} | {tenant}
            gone = tenant.engine.ended or (tenant.holder is not None and tenant.holder.ended)
        tenant.on_rest(self._rest)
        if gone:
            tenant.close()
        return tenant

    def _lose(self, name: str, epoch: int) -> None:
        """End a tenant's process that does not answer the engine: it hangs, or is dead already."""
        with self._lock:
            lost = [t for t in self._tenants if (t.name, t.about.get("epoch")) == (name, epoch)]
        for tenant in lost:
            tenant.kill()

    def _rest(self) -> None:
        """End the engine where no function is left that has let nothing go: scale to zero."""
        with self._lock:
            engine, left = self._engine, any(not tenant.ended for tenant in self._tenants)
            if engine is not None and not left:
                engine.end_if_idle()

    def _watch(self, engine: Running) -> None:
        """Pass answers on; with the engine its tenants end."""
        engine.read()
        with self._lock:
            members = [tenant for tenant in self._tenants if tenant.engine is engine]
            self._tenants -= {*members}
        for tenant in members:
            tenant.close()
        if self._shared is not None:  # it may hold adapters of which nobody here knows any more
            self._shared.stop()

    def _end_held(self, process: Running) -> None:
        """End the functions whose adapters were in a process that has ended."""
        with self._lock:
            members = [tenant for tenant in self._tenants if tenant.holder is process]
            self._tenants -= {*members}
        for tenant in members:
            tenant.close()


class Tenant:
    """One function's process as its `Function` sees it: see `running.Running`."""

    def __init__(
        self,
        engine: Running,
        name: str,
        adapter: str | None,
        connection: socket.socket | None,
        pid: int,
        about: dict[str, Any],
        holder: Running | None = None,
    ):
        """`connection` is the process's own, None for what is in the engine, or in a `holder` of
        several adapters.
        """
        self._rest: Callable[[], None] = lambda: None
        self.engine, self.name, self.pid, self.about = engine, name, pid, about
        self.holder = holder
        self._adapter, self._connection = adapter, connection
        self._ending = threading.Event()
        self.ended = False
        self._lock = threading.Lock()  # the descriptor, while it is used or closed
        self._process: int | None = None  # a descriptor of it: process ids are used again
        if connection is not None or holder is not None:
            with contextlib.suppress(OSError):
                self._process = os.pidfd_open(pid)

    def kill(self) -> None:
        """End the process at once, also one that hangs; calls from now on go to the next one."""
        self.ended = True
        if self.holder is not None:  # before its end is seen, or the next start would ask it
            self.holder.give_up()
        with self._lock, contextlib.suppress(OSError):
            if self._process is not None:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self.close()

    def on_rest(self, rest: Callable[[], None]) -> None:
        """Have `rest` called when this function has let its process go."""
        self._rest = rest

    def send(self, call: dict[str, Any]) -> "queue.SimpleQueue[dict[str, Any]] | None":
        """Send a call; return where its answers come, None where the process has ended before."""
        if self.ended:
            return None
        answers = self.engine.send({**call, "adapter": self._adapter}, owner=self.name)
        if self.ended:  # meanwhile: `read` may not have seen this call, which goes to the next one
            self.engine.fail(self.name)
            return None
        return answers

    def connect(self) -> socket.socket | None:
        """Return a connection to the engine's routes, under way until it is closed."""
        return None if self.ended else self.engine.connect(owner=self.name)

    @property
    def is_idle(self) -> bool:
        """True if no call of this function is under way."""
        return not self.engine.has_calls(self.name)

    @property
    def own_pid(self) -> int | None:
        """Process id of a process that is this function's alone; None: it is several functions'."""
        return None if self._connection is None else self.pid

    @property
    def ended_by_others(self) -> bool:
        """True if it ended with the engine or the holder, and calls had been answered: not by this
        adapter alone.
        """
        ended = self.engine.ended or (self.holder is not None and self.holder.ended)
        return ended and self.engine.has_answered

    def end_if_idle(self) -> bool:
        """Let the process end unless calls are under way; return whether it does."""
        if self.ended or not self.is_idle:
            return False
        self.close()
        self._rest()
        return True

    def read(self) -> None:
        """Return when the process has ended; calls under way get an answer that says so."""
        if self._connection is None:
            self._ending.wait()
        else:
            with contextlib.suppress(OSError):
                while self._connection.recv(64):
                    pass  # it sends nothing: only the end of the connection matters
        self.ended = True
        self.engine.fail(self.name)
        with self._lock:
            if self._process is not None:
                os.close(self._process)
                self._process = None
        if self._connection is not None:
            self._connection.close()
        if self._adapter is not None:
            epoch = self.about["epoch"]
            self.engine.send({"call": "leave", "name": self.name, "epoch": epoch})

    def close(self) -> None:
        """Let both sides read the connection's end."""
        self.ended = True
        self._ending.set()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


def _taken_in(name: str, answers: "queue.SimpleQueue[dict[str, Any]] | None") -> None:
    """Return when the engine has taken a tenant in. Raises as `Tenants.start`."""
    try:
        answer = None if answers is None else answers.get(timeout=_SIT_S)
    except queue.Empty:
        raise ConnectionError(f"The engine did not take {name!r} in within {_SIT_S} s.") from None
    value_of_start(name, "The engine of the backbone", answer)
