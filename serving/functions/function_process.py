"""Life of a function: attach to the backbone, build an engine with one adapter, answer calls.

A function has its own memory for KV pages, adapter and programs, and maps the backbone for reading.
It listens nowhere: its only connection is the socket that it was born with, whose end ends it.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from lora_jax import own_files
from lora_jax.memory.arena import ImportedArena, parse_manifest
from lora_jax.memory.platforms import for_platform
from lora_jax.memory.wire import ShareError, close_all, receive_fds, receive_header, send_header
from lora_jax.ops import dispatch
from serving.api.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.loop.pacing import SWITCH_S
from serving.engine.parts.brought_parts import needed_sizes
from serving.functions import guard_process, jail, rehearsal, tenant_process
from serving.functions.device_memory import share_of
from serving.functions.messages import http_of, output_fields, sampling_of
from serving.functions.turn_side import TurnSide
from serving.lora_server.tenant_side import TenantAccess, TenantSide, digest_of, report_of
from serving.lora_server.transport.tenants import Seat
from serving.runtime import xla_memory
from serving.runtime.program_cache import keep_programs_apart, step_files
from serving.steps import kept_steps
from serving.steps.kept_steps import NotKept

if TYPE_CHECKING:
    from serving.functions.http_side import HttpSide

logger = logging.getLogger(__name__)

_GROWN_S = 5.0  # until the other programs are read and the first calls answered
_CALLS = 64  # of one adapter, answered at a time; more wait, and others' do not
_OF_CALLERS = ("generate", "stream", "http")
_SEATING = ("sit", "leave", "load")  # answered in their order, whatever else waits
_NO_MEMORY = "resource_exhausted", "out of memory", "out_of_memory"  # in an error of XLA
_SET_DUMPABLE, _NO_NEW_PRIVS = 4, 38  # of prctl
HTTP = "serving.functions.http_side"  # half a second of imports, for functions with routes alone


def main(connection, on_end: Callable[[], Any] = lambda: None) -> None:
    """Be a function until the other side of the connection has gone, of which `on_end` is told."""
    order = receive_header(connection)
    programs = order.get("programs")
    folders = [] if programs is None else keep_programs_apart(**programs)
    if order.get("jail") is not None:
        _enter_jail(order, folders)
    _shut_others_out()
    if order.get("tenant"):
        tenant_process.run(connection, order, private_bytes)
        return
    if order.get("guard"):
        guard_process.run(connection, order)
        return
    if order.get("http") and HTTP not in sys.modules:  # beside the rest of the start
        threading.Thread(target=importlib.import_module, args=(HTTP,), daemon=True).start()
    manifest = parse_manifest(order["manifest"])
    fds = receive_fds(connection, len(manifest.blocks))
    turns = _turns_of(connection, order)
    start, sizes = time.monotonic(), {}
    sys.setswitchinterval(SWITCH_S)
    gc.disable()  # a start makes little garbage
    try:
        name, folder = order["name"], order["adapter"]
        adapters = {} if folder is None else {name: folder}
        # Programs are kept by these sizes: a process without the adapter can make them.
        sizes = needed_sizes(EngineConfig(order["model"], **order["fields"]), adapters)
        memory = for_platform(order["device"])
        share, makes = share_of(order, sizes, memory), _makes_programs(order)
        if share is not None and not makes:
            share.take()  # before jax takes the device
        if (kept := step_files()) is not None:
            kept_steps.read_ahead(kept[0], order.get("steps", []))
        arena = ImportedArena(memory, manifest, fds)
        attached = time.monotonic()
        tenants = order.get("tenants") and TenantAccess(**order["tenants"])
        shared = {"backbone": arena, "turns": turns, "lora_server": tenants}
        engine = Engine(order["model"], adapters, **shared, **order["fields"] | sizes)
        if share is not None and makes:
            share.keep()
        side = order.get("http") and _http_side(engine, order["http"])
    except NotKept as error:
        send_header(connection, _lacks(order, sizes, str(error)))
        return
    except jax.errors.JaxRuntimeError as error:
        bounded = xla_memory.is_bounded() and _is_of_memory(str(error))
        if bounded or _may_lack_programs(order, str(error)):
            lacks = _lacks(order, sizes, f"{type(error).__name__}: {error}")
            send_header(connection, lacks | ({"lacks_memory": True} if bounded else {}))
            return
        text = f"Function {order['name']!r} cannot start: {type(error).__name__}: {error}"
        send_header(connection, {"error": text, "retryable": True})
        return
    except (ValueError, KeyError, TypeError, OSError, NotImplementedError) as error:
        send_header(connection, {"error": f"Function {order['name']!r} cannot start: {error}"})
        return
    finally:
        gc.enable()
        close_all(fds)
    about = {
        "attach_s": attached - start,
        "start_s": time.monotonic() - start,
        "private_bytes": private_bytes(),
        "steps": kept_steps.used,
        "max_model_len": engine.model_info.max_model_len,
        "tenants": tenants and tenants.sizes(engine.config),
    }
    send_header(connection, {"ready": True, **about})
    with engine:
        adapter = name if adapters else None
        calls = _Calls(connection, engine, arena, adapter, side, tenants and tenants.side)
        threading.Thread(target=calls.end_with_engine, name="end", daemon=True).start()
        again = threading.Timer(_GROWN_S, calls.say_memory)
        again.daemon = True
        again.start()
        calls.answer()
        again.cancel()
        on_end()


def _enter_jail(order: dict[str, Any], folders: list[Path]) -> None:
    """Leave this process no files but its own and the system's, and no network.

    It reads the model's files, its adapter, what the settings name, and programs in `folders`,
    which it writes only where the order says so; it writes the folder of budgets.
    """
    model, http = Path(order["model"]), order.get("http") or {}
    named = [order["adapter"], *order["fields"].values(), *http.get("settings", {}).values()]
    paths = [Path(n) for n in named if isinstance(n, str) and n and os.path.exists(n)]
    inside = [f for folder in (model, *paths) for f in folder.glob("*") if f.is_file()]
    private = [model, *paths]
    with contextlib.suppress(OSError):  # who uses it says why it cannot be there
        own_files.own_folder(dispatch.cache_folder())
    budgets = http.get("budgets_folder")
    failed = jail.enter(
        [*jail.code_folders(private), *inside, *paths, dispatch.cache_folder(), *folders],
        [*filter(None, [budgets]), *(folders if _makes_programs(order) else [])],
        [model],
        memory_bytes=order["jail"]["memory_bytes"],
        network=bool(order["fields"].get("otlp_traces_endpoint")),
        gpus=order["jail"]["gpus"],
        programs=jail.interpreter() if _tries_grammars(order) else [],
    )
    for what in failed:
        logger.warning("Function %r runs without %s", order["name"], what)


def _tries_grammars(order: dict[str, Any]) -> bool:
    """Return whether the engine starts a process that compiles grammars before it does."""
    fields = order["fields"]
    return "manifest" in order and fields.get("structured_outputs", EngineConfig.structured_outputs)


def _http_side(engine: Engine, http: dict[str, Any]) -> "HttpSide":
    """Return the routes of the engine; waits where they are being imported."""
    make = importlib.import_module(HTTP).HttpSide
    return make(engine, http_of(http["settings"]), http["budgets_folder"])


def _makes_programs(order: dict[str, Any]) -> bool:
    return bool(order.get("programs") and order["programs"].get("writes"))


def _is_of_memory(text: str) -> bool:
    return any(words in text.lower() for words in _NO_MEMORY)


def _may_lack_programs(order: dict[str, Any], text: str) -> bool:
    """Return whether an error of XLA may come from the jail, in which its assembler cannot start.

    Elsewhere it is the device's, and so is one of memory everywhere.
    """
    if _is_of_memory(text):
        return False
    demands = bool(order.get("programs") and order["programs"].get("demands"))
    return demands and bool(order.get("jail") and order["jail"]["gpus"])


def _lacks(order: dict[str, Any], sizes: dict[str, int], missing: str) -> dict[str, Any]:
    """Return what the agent is told of a program that is not kept, with sizes for its maker."""
    logger.info("Function %r has not all of its programs: %s", order["name"], missing)
    return {"ready": False, "missing": missing, "sizes": sizes}


def _turns_of(connection, order: dict[str, Any]) -> TurnSide | None:
    """Return the function's turns on the device; None: it need not share the device."""
    if order.get("turns") is None:
        return None
    (fd,) = receive_fds(connection, 1)
    limit = EngineConfig(order["model"], **order["fields"]).step_seqs
    return TurnSide(socket.socket(fileno=fd), order["turns"]["slo_s"], limit)


class _Calls:
    """Answers of one function, each on a thread of its own."""

    def __init__(
        self,
        connection,
        engine: Engine,
        arena: ImportedArena,
        adapter: str | None,
        http: "HttpSide | None",
        tenants: TenantSide | None = None,
    ):
        self._connection, self._engine, self._arena = connection, engine, arena
        self._adapter, self._http, self._tenants = adapter, http, tenants
        self._sending = threading.Lock()

    def answer(self) -> None:
        """Return when the other side has gone."""
        pools: dict[str | None, ThreadPoolExecutor] = {}
        seating = ThreadPoolExecutor(1, thread_name_prefix="seat")
        is_new = True
        try:
            while True:
                if is_new and not self._is_asked_within(rehearsal.QUIET_S):
                    is_new = False
                    asked = functools.partial(self._is_asked_within, 0)
                    rehearsal.rehearse(self._engine, self._adapter, self._http, asked)
                call = receive_header(self._connection)
                is_new &= call["call"] not in _OF_CALLERS
                if call["call"] == "http":
                    self._adopt(call["id"])
                elif call["call"] in _SEATING:
                    if call["call"] == "leave" and (left := pools.pop(call["name"], None)):
                        left.shutdown(wait=False)  # its threads end with the calls that it has
                    is_sit = call["call"] == "sit"
                    fds = receive_fds(self._connection, 3) if is_sit else []
                    seating.submit(self._answer, call | {"fds": fds})
                else:
                    owner = call.get("adapter")
                    if owner not in pools:  # threads are made as calls need them
                        pools[owner] = ThreadPoolExecutor(_CALLS, thread_name_prefix="call")
                    pools[owner].submit(self._answer, call)
        except ShareError:
            for calls in (*pools.values(), seating):
                calls.shutdown(wait=False, cancel_futures=True)

    def end_with_engine(self) -> None:
        """Let this process end when its engine has died, and say so if it had too little memory.

        Calls under way are answered by the end of the connection, behind which the agent starts
        another process.
        """
        error = self._engine.end.result()
        if error is None:
            return
        with contextlib.suppress(OSError):  # the agent has gone too
            if xla_memory.is_bounded() and _is_of_memory(str(error)):
                self._send({"lacks_memory": True})
            self._connection.shutdown(socket.SHUT_RDWR)

    def say_memory(self) -> None:
        """Tell the agent what this process holds now, which is more than when it was ready."""
        with contextlib.suppress(OSError):  # the agent has gone
            self._send({"private_bytes": private_bytes()})

    def _is_asked_within(self, seconds: float) -> bool:
        return bool(select.select([self._connection], [], [], seconds)[0])

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
            value = {
                "error": type(error).__name__,
                "text": str(error),
                "retryable": getattr(error, "retryable", False),
            }
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
            sampling = [sampling_of(fields) for fields in call["sampling"]]
            return [
                output_fields(output)
                for output in self._engine.generate(call["prompts"], adapter, sampling)
            ]
        if call["call"] == "stream":
            (sampling,) = (sampling_of(fields) for fields in call["sampling"])
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
        channel, bell, life = call["fds"]
        try:
            report = report_of(call["report"])
            tenants.seat_of(name, report.digest)
        except BaseException:
            close_all(call["fds"])
            raise
        tenants.sit(name, report, Seat(channel, bell, life, call["epoch"]))
        digest = digest_of(name, report.digest)
        try:
            registry.load(name, name, replace=True, pinned=True, confined=False, digest=digest)
        except BaseException:
            tenants.leave(name, call["epoch"])
            raise

    def _send(self, fields: dict[str, Any]) -> None:
        with self._sending:
            send_header(self._connection, fields)


def backbone_memory(maps: str = "/proc/self/smaps") -> dict[str, int]:
    """Return bytes of this process's maps of shared pages: size, and its share of them (Pss)."""
    totals, ours = {"Size": 0, "Pss": 0}, False
    with open(maps) as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if "-" in name and " " in line.split(":")[0]:  # the head of a mapping
                ours = "lora_jax_pages" in line
            elif ours and name in totals:
                totals[name] += int(rest.split()[0]) << 10
    return totals


def private_bytes(path: str = "/proc/self/smaps_rollup") -> int:
    """Return bytes of memory that only this process holds; they are free when it has ended."""
    with open(path) as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def _shut_others_out() -> None:
    """Let no process of the same user trace this one or read its memory, and gain no privileges."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
