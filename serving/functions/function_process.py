"""Life of a function: attach to the backbone, build an engine with one adapter, answer calls.

A function has its own memory for KV pages, adapter and programs, and maps the backbone for reading.
It listens nowhere: its only connection is the socket that it was born with, whose end ends it.
"""

import contextlib
import ctypes
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
from typing import Any

import jax

from lora_jax import own_files
from lora_jax.memory.arena import ImportedArena, parse_manifest
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
from serving.functions.turn_side import TurnSide
from serving.runtime import xla_memory
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
    if order.get("guard"):
        guard_process.run(connection, order)
        return
    late = LateImports([*_imports_of(order), CALLS, *([HTTP] if order.get("http") else [])])
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
        jax.devices()  # XLA's client, outside of Python's lock
        calls = late.get(CALLS)
        tenants = order.get("tenants") and calls.TenantAccess(**order["tenants"])
        shared = {"backbone": arena, "turns": turns, "lora_server": tenants}
        engine = calls.Engine(order["model"], adapters, **shared, **order["fields"] | sizes)
        if share is not None and makes:
            share.keep()
        side = order.get("http") and calls.http_side(engine, order["http"], late.get(HTTP))
    except NotKept as error:
        send_header(connection, _lacks(order, sizes, str(error)))
        return
    except jax.errors.JaxRuntimeError as error:
        bounded = _bound_is_too_small(error)
        if bounded or _may_lack_programs(order, str(error)):
            lacks = _lacks(order, sizes, f"{type(error).__name__}: {error}")
            send_header(connection, lacks | ({"lacks_memory": True} if bounded else {}))
            return
        text = f"Function {order['name']!r} cannot start: {type(error).__name__}: {error}"
        send_header(connection, {"error": text, "retryable": True})
        return
    except (ValueError, KeyError, TypeError, OSError, NotImplementedError) as error:
        if _bound_is_too_small(error):  # the engine says so of a step as a ValueError
            send_header(connection, _lacks(order, sizes, str(error)) | {"lacks_memory": True})
            return
        send_header(connection, {"error": f"Function {order['name']!r} cannot start: {error}"})
        return
    finally:
        gc.freeze()  # what a start leaves stays: no later look passes through it
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
        served = calls.Calls(connection, engine, arena, adapter, side, tenants and tenants.side)
        threading.Thread(target=served.end_with_engine, name="end", daemon=True).start()
        again = threading.Timer(_GROWN_S, served.say_memory)
        again.daemon = True
        again.start()
        served.answer()
        again.cancel()
        on_end()


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
