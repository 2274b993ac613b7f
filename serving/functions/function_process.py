"""Life of a function: attach to the backbone, build an engine with one adapter, answer calls.

A function has its own memory for KV pages, adapter and programs, and maps the backbone for reading.
It listens nowhere: its only connection is the socket that it was born with, whose end ends it.
"""

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from lora_jax import own_files
from lora_jax.memory.arena import ImportedArena, Manifest, parse_manifest
from lora_jax.memory.platforms import for_platform
from lora_jax.memory.wire import close_all, receive_fds, receive_header, send_header
from lora_jax.ops import dispatch
from serving.api.config import EngineConfig
from serving.api.generation_config import FROM_MODEL, NONE
from serving.engine.loop.pacing import SWITCH_S
from serving.engine.parts.needed_sizes import needed_sizes
from serving.functions import guard_process, jail
from serving.functions.device_memory import share_of
from serving.functions.late_imports import LateImports
from serving.functions.process_memory import is_of_memory, private_bytes
from serving.functions.turns.side import TurnSide
from serving.runtime import xla_memory
from serving.runtime.gpu_assignment import use_gpu
from serving.runtime.program_cache import keep_programs_apart, step_files
from serving.steps import kept_steps
from serving.steps.kept_steps import NotKept

logger = logging.getLogger(__name__)

_GROWN_S = 5.0  # until the other programs are read and the first calls answered
# Settings that name a file or folder. Others, such as a parser, may be called as a folder here is.
_PATHS = "chat_template", "generation_config"
_SET_DUMPABLE, _NO_NEW_PRIVS = 4, 38  # of prctl
# Imported here only where the zygote has not done so before its fork.
CALLS = "serving.functions.calls"  # with the engine
HTTP = "serving.functions.http_side"  # half a second of imports, for functions with routes alone
TENANT = "serving.functions.tenant_process"
SHARED = "serving.functions.adapters_process"
# Errors of a start that the agent is told; others are faults, and end the process.
_REFUSALS = (
    NotKept,
    jax.errors.JaxRuntimeError,
    ValueError,
    KeyError,
    TypeError,
    OSError,
    NotImplementedError,
)


def main(connection, on_end: Callable[[], Any] = lambda: None) -> None:
    """Be a function until the other side of the connection has gone, of which `on_end` is told."""
    order = receive_header(connection)
    programs = order.get("programs")
    folders = [] if programs is None else keep_programs_apart(**programs)
    if order.get("jail") is not None:
        _enter_jail(order, folders)
    _shut_others_out()
    if order.get("tenant"):
        importlib.import_module(TENANT).run(connection, order, private_bytes)
        return
    if order.get("shared"):
        importlib.import_module(SHARED).run(connection, order, private_bytes)
        return
    if order.get("guard"):
        guard_process.run(connection, order)
        return
    _live(connection, order, on_end)


def _live(connection, order: dict[str, Any], on_end: Callable[[], Any]) -> None:
    """Start the engine of a function and answer its calls; a start that fails tells the reason."""
    late = LateImports([*_imports_of(order), CALLS, *([HTTP] if order.get("http") else [])])
    manifest = parse_manifest(order["manifest"])
    fds = receive_fds(connection, len(manifest.blocks))
    turns = _turns_of(connection, order)
    start, sizes = time.monotonic(), {}
    sys.setswitchinterval(SWITCH_S)
    gc.disable()  # a start makes little garbage
    try:
        built = _build(order, late, manifest, fds, turns, sizes)
    except _REFUSALS as error:
        send_header(connection, _refusal(order, sizes, error))
        return
    finally:
        gc.freeze()  # what a start leaves stays: no later look passes through it
        gc.enable()
        close_all(fds)
    tenants = built.tenants
    about = {
        "attach_s": built.attached - start,
        "start_s": time.monotonic() - start,
        "private_bytes": private_bytes(),
        "steps": kept_steps.used,
        "max_model_len": built.engine.model_info.max_model_len,
        "quantization": built.engine.model_info.quantization,
        "tenants": tenants and tenants.sizes(built.engine.config),
    }
    send_header(connection, {"ready": True, **about})
    _answer(connection, order, late.get(CALLS), built, on_end)


@dataclasses.dataclass(frozen=True, eq=False)
class _Built:
    """Parts that a start has built, by modules that are imported late."""

    engine: Any
    arena: ImportedArena
    side: Any  # HTTP; None: without routes
    tenants: Any  # TenantAccess or SharedAccess; None: the adapter is in this process
    attached: float  # when the backbone was mapped, of time.monotonic


def _build(
    order: dict[str, Any],
    late: LateImports,
    manifest: Manifest,
    fds: list[int],
    turns: TurnSide | None,
    sizes: dict[str, int],
) -> _Built:
    """Return the engine over the backbone; `sizes` gets those that its programs are kept by."""
    adapters = _adapters_of(order)
    if order["device"] != "cpu" and "address" in (order.get("tenants") or {}):
        use_gpu(0)  # the next one is that of all adapters
    # Programs are kept by these sizes: a process without the adapter can make them.
    sizes.update(needed_sizes(EngineConfig(order["model"], **order["fields"]), adapters))
    memory = for_platform(order["device"])
    share, makes = share_of(order, sizes, memory), _makes_programs(order)
    if share is not None and not makes:
        share.take()  # before jax takes the device
    if (kept := step_files()) is not None:
        kept_steps.read_ahead(kept[0], order.get("steps", []))
    arena = ImportedArena(memory, manifest, fds)
    attached = time.monotonic()
    jax.devices()  # XLA's client, outside of Python's lock
    calls = late.get(CALLS)
    tenants = order.get("tenants") and calls.access_of(order["tenants"])
    shared = {"backbone": arena, "turns": turns, "lora_server": tenants}
    engine = calls.Engine(order["model"], adapters, **shared, **order["fields"] | sizes)
    if share is not None and makes:
        share.keep()
    side = order.get("http") and calls.http_side(engine, order["http"], late.get(HTTP))
    return _Built(engine, arena, side, tenants, attached)


def _answer(
    connection, order: dict[str, Any], calls: ModuleType, built: _Built, on_end: Callable[[], Any]
) -> None:
    """Answer calls until the agent has gone."""
    with built.engine as engine:
        adapter, tenants = order["name"] if _adapters_of(order) else None, built.tenants
        side = tenants and tenants.side
        served = calls.Calls(connection, engine, built.arena, adapter, built.side, side)
        threading.Thread(target=served.end_with_engine, name="end", daemon=True).start()
        again = threading.Timer(_GROWN_S, served.say_memory)
        again.daemon = True
        again.start()
        served.answer()
        again.cancel()
        on_end()


def _adapters_of(order: dict[str, Any]) -> dict[str, str]:
    return {} if order["adapter"] is None else {order["name"]: order["adapter"]}


def _refusal(order: dict[str, Any], sizes: dict[str, int], error: Exception) -> dict[str, Any]:
    """Return what the agent is told of a start that ended with an error of _REFUSALS."""
    if isinstance(error, NotKept):
        return _lacks(order, sizes, str(error))
    of_device = isinstance(error, jax.errors.JaxRuntimeError)
    text = f"{type(error).__name__}: {error}" if of_device else str(error)
    if _bound_is_too_small(error):  # the engine says so of a step as a ValueError
        return _lacks(order, sizes, text) | {"lacks_memory": True}
    if of_device and _may_lack_programs(order, str(error)):
        return _lacks(order, sizes, text)
    told = {"error": f"Function {order['name']!r} cannot start: {text}"}
    return told | ({"retryable": True} if of_device else {})


def _imports_of(order: dict[str, Any]) -> list[str]:
    """Return what programs that are read ahead import on threads of their own, to be first."""
    return list(kept_steps.OF_GPU) if order["device"] == "gpu" and order.get("steps") else []


def _enter_jail(order: dict[str, Any], folders: list[Path]) -> None:
    """Leave this process no files but its own and the system's, and no network.

    It reads the model's files, its adapter, what the settings name, and programs in `folders`,
    which it writes only where the order says so; it writes the folder of budgets.
    """
    model, http = Path(order["model"]), order.get("http") or {}
    named = [order["adapter"], *(order["fields"].get(name) for name in _PATHS)]
    paths = [Path(n) for n in named if n and n not in (FROM_MODEL, NONE) and os.path.exists(n)]
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


def _makes_programs(order: dict[str, Any]) -> bool:
    return bool(order.get("programs") and order["programs"].get("writes"))


def _bound_is_too_small(error: Exception) -> bool:
    """Return whether the process, started again with more of the device's memory, may start."""
    return xla_memory.is_bounded() and is_of_memory(str(error))


def _may_lack_programs(order: dict[str, Any], text: str) -> bool:
    """Return whether an error of XLA may come from the jail, in which its assembler cannot start.

    Elsewhere it is the device's, and so is one of memory everywhere.
    """
    if is_of_memory(text):
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


def _shut_others_out() -> None:
    """Let no process of the same user trace this one or read its memory, and gain no privileges."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
