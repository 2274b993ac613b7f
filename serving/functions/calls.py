"""Answers of a function's process to its agent, which it only gets over their connection."""

import contextlib
import functools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lora_jax.memory.arena import ImportedArena
from lora_jax.memory.wire import (
    ShareError,
    close_all,
    is_readable,
    receive_fds,
    receive_header,
    send_header,
)
from serving.api.sampling import Sampling
from serving.engine.engine import Engine
from serving.functions import rehearsal
from serving.functions.messages import error_fields, http_of, output_fields, sampling_of
from serving.functions.process_memory import backbone_memory, is_of_memory, private_bytes
from serving.lora_server.shared_side import SharedAccess, SharedSide
from serving.lora_server.tenant_side import TenantAccess, TenantSide, digest_of, report_of
from serving.lora_server.transport.tenants import Seat
from serving.runtime import xla_memory

if TYPE_CHECKING:
    from serving.functions.http_side import HttpSide

_CALLS = 64  # of one adapter, answered at a time; more wait, and others' do not
_REHEARSED_S = 10.0  # that one call may take which nobody made
_OF_CALLERS = ("generate", "stream", "http")
_SEATING = ("sit", "leave", "load")  # answered in their order, whatever else waits


def http_side(engine: Engine, http: dict[str, Any], module: ModuleType) -> "HttpSide":
    """Return the routes of the engine, made by their module."""
    return module.HttpSide(engine, http_of(http["settings"]), http["budgets_folder"])


def access_of(sizes: dict[str, Any]) -> TenantAccess | SharedAccess:
    """Return an engine's access to processes of adapters; one that has all has an address."""
    return SharedAccess(**sizes) if "address" in sizes else TenantAccess(**sizes)


class Calls:
    """Answers of one function, each on a thread of its own."""

    def __init__(
        self,
        connection,
        engine: Engine,
        arena: ImportedArena,
        adapter: str | None,
        http: "HttpSide | None",
        tenants: TenantSide | SharedSide | None = None,
    ):
        self._connection, self._engine, self._arena = connection, engine, arena
        self._adapter, self._http, self._tenants = adapter, http, tenants
        self._sending = threading.Lock()
        if tenants is not None:
            tenants.on_lost = self._say_lost
        if isinstance(tenants, SharedSide):
            tenants.on_free = self._say_free

    def answer(self) -> None:
        """Return when the other side has gone."""
        pools: dict[str | None, ThreadPoolExecutor] = {}
        pools[None] = ThreadPoolExecutor(_CALLS, thread_name_prefix="call")  # of its own adapter
        seating = ThreadPoolExecutor(1, thread_name_prefix="seat")
        is_new = True
        try:
            while True:
                if is_new and not self._is_asked_within(rehearsal.QUIET_S):
                    is_new = False
                    self._rehearse(pools[None])
                call = receive_header(self._connection)
                is_new &= call["call"] not in _OF_CALLERS
                self._pass_on(call, pools, seating)
        except ShareError:
            for calls in (*pools.values(), seating):
                calls.shutdown(wait=False, cancel_futures=True)

    def _pass_on(
        self,
        call: dict[str, Any],
        pools: dict[str | None, ThreadPoolExecutor],
        seating: ThreadPoolExecutor,
    ) -> None:
        """Have a call answered: on threads of its adapter's, which are made as calls need them.

        Seats change on a thread of their own; a connection of HTTP is taken over at once.
        """
        if call["call"] == "http":
            self._adopt(call["id"])
        elif call["call"] in _SEATING:
            if call["call"] == "leave" and (left := pools.pop(call["name"], None)):
                left.shutdown(wait=False)  # its threads end with the calls that it has
            has_seat = call["call"] == "sit" and "number" not in call
            fds = receive_fds(self._connection, 3) if has_seat else []
            seating.submit(self._answer, call | {"fds": fds})
        else:
            owner = call.get("adapter")
            if owner not in pools:
                pools[owner] = ThreadPoolExecutor(_CALLS, thread_name_prefix="call")
            pools[owner].submit(self._answer, call)

    def _rehearse(self, pool: ThreadPoolExecutor) -> None:
        """Answer calls of nobody as others are: on threads of `pool`, over a connection."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(_REHEARSED_S)
            twin = Calls(theirs, self._engine, self._arena, self._adapter, self._http)

            def ask(prompt: str | list[int]) -> bool:
                asking = {"prompts": [prompt], "sampling": [rehearsal.SAMPLING]}
                send_header(ours, {"id": 0, "call": "generate", **asking})
                pool.submit(twin._answer, receive_header(theirs)).result(_REHEARSED_S)
                return "value" in receive_header(ours)

            def http(prompt: str) -> int:
                return 0 if self._http is None else self._http.rehearse(self._adapter, prompt)

            asked = functools.partial(self._is_asked_within, 0)
            rehearsal.rehearse(self._engine, ask, http, asked)

    def end_with_engine(self) -> None:
        """Let this process end when its engine has died, and say so if it had too little memory.

        Calls under way are answered by the end of the connection, behind which the agent starts
        another process.
        """
        error = self._engine.end.result()
        if error is None:
            return
        with contextlib.suppress(OSError):  # the agent has gone too
            if xla_memory.is_bounded() and is_of_memory(str(error)):
                self._send({"lacks_memory": True})
            self._connection.shutdown(socket.SHUT_RDWR)

    def say_memory(self) -> None:
        """Tell the agent what this process holds now, which is more than when it was ready."""
        with contextlib.suppress(OSError):  # the agent has gone
            self._send({"private_bytes": private_bytes()})

    def _is_asked_within(self, seconds: float) -> bool:
        return is_readable(self._connection, seconds)

    def _adopt(self, number: int) -> None:
        """Give the connection that comes with this call to HTTP; its end is the answer."""
        (fd,) = receive_fds(self._connection, 1)
        if self._http is None:
            close_all([fd])
            self._send({"id": number, "value": None})
            return

        def closed() -> None:
            with contextlib.suppress(OSError):  # the agent has gone too
                self._send({"id": number, "value": None})

        self._http.adopt(fd, closed)

    def _answer(self, call: dict[str, Any]) -> None:
        try:
            value = {"value": self._do(call)}
        except Exception as error:  # the call's own: others go on
            if self._engine.end.done() and self._engine.end.result() is not None:
                return  # see end_with_engine
            value = error_fields(error)
            value |= self._blame(call, value["retryable"])
        self._send({"id": call["id"], **value})

    def _blame(self, call: dict[str, Any], retryable: bool) -> dict[str, Any]:
        """Return what makes of a failure the end of the adapter's process, if that is why."""
        name = call.get("adapter")
        if self._tenants is None or not retryable or not isinstance(name, str):
            return {}
        epoch = self._tenants.lost_epoch(name)
        return {} if epoch is None else {"error": "FunctionDied", "tenant": name, "epoch": epoch}

    def _do(self, call: dict[str, Any]) -> Any:
        adapter = call.get("adapter", self._adapter)
        if call["call"] == "generate":
            sampling = [self._sampling(fields) for fields in call["sampling"]]
            return [
                output_fields(output)
                for output in self._engine.generate(call["prompts"], adapter, sampling)
            ]
        if call["call"] == "stream":
            (sampling,) = (self._sampling(fields) for fields in call["sampling"])
            for piece in self._engine.stream(call["prompts"][0], adapter, sampling):
                self._send({"id": call["id"], "piece": piece.text})
            return None
        if call["call"] == "changed":
            return self._arena.changed()
        if call["call"] == "memory":
            return backbone_memory()
        if call["call"] in _SEATING:
            return self._take(call)
        if call["call"] == "metrics":
            return "" if self._http is None else self._http.metrics_text()
        raise ValueError(f"Unknown call {call['call']!r}.")

    def _sampling(self, fields: dict[str, Any] | None) -> Sampling:
        """Return the sampling of a call; the model's default where it has none."""
        return self._engine.default_sampling() if fields is None else sampling_of(fields)

    def _take(self, call: dict[str, Any]) -> None:
        """Take an adapter or its process in, or let one go, unless a newer one has its name."""
        name, registry, tenants = call["name"], self._engine.registry, self._tenants
        if call["call"] == "leave":
            if tenants is None or tenants.leave(name, call["epoch"]):
                registry.unload(name)
            return
        if tenants is None:
            registry.load(name, call["folder"], replace=True, pinned=True, confined=False)
            return
        digest = self._seated(tenants, call)
        try:
            registry.load(name, name, replace=True, pinned=True, confined=False, digest=digest)
        except BaseException:
            tenants.leave(name, call["epoch"])
            raise

    def _seated(self, tenants: TenantSide | SharedSide, call: dict[str, Any]) -> str:
        """Take in an adapter that is in another process; return its digest here."""
        name, epoch = call["name"], call["epoch"]
        if isinstance(tenants, SharedSide):
            place = call["number"], epoch, call["life"]
            return tenants.sit(name, report_of(call["report"]), *place)
        channel, bell, life = call["fds"]
        try:
            report = report_of(call["report"])
            tenants.seat_of(name, report.digest)
        except BaseException:
            close_all(call["fds"])
            raise
        tenants.sit(name, report, Seat(channel, bell, life, epoch))
        return digest_of(name, report.digest)

    def _say_lost(self, name: str, epoch: int) -> None:
        """Tell the agent of an adapter's process that hangs, or has ended.

        Answers to HTTP do not pass the agent: of a process that hangs it learns by this alone.
        """
        with contextlib.suppress(OSError):  # the agent has gone
            self._send({"lost": name, "epoch": epoch})

    def _say_free(self, number: int) -> None:
        """Tell the agent that no step has rows of an adapter that has left."""
        with contextlib.suppress(OSError):  # the agent has gone
            self._send({"freed": number})

    def _send(self, fields: dict[str, Any]) -> None:
        with self._sending:
            send_header(self._connection, fields)
