"""One process of `device_pages`: the owner of pages, or an importer of them.

`python -m bench.functions.page_worker FD ROLE`; orders come over the socket FD as JSON.
"""

import ctypes
import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.memory.arena import Arena, ImportedArena, Manifest, parse_manifest
from lora_jax.memory.platforms import for_platform
from lora_jax.memory.virtual import AbstractVirtualMemory, Access
from lora_jax.memory.wire import close_all, receive_fds, receive_header, send_fds, send_header

PROBE = np.arange(1 << 20, dtype=np.float32)


def main(connection: socket.socket, role: str) -> None:
    """Answer orders until the other side has gone."""
    jnp.zeros(1).block_until_ready()  # the context
    memory = for_platform(jax.default_backend())
    send_header(connection, {"used": _used(memory)})
    (_own if role == "owner" else _import)(connection, memory)


def _own(connection: socket.socket, memory: AbstractVirtualMemory) -> None:
    """Make pages with PROBE at their beginning; hand them over, and read them when asked."""
    size = receive_header(connection)["bytes"]
    arena, start = Arena(memory, size), time.perf_counter()
    probe = arena.add("probe", PROBE)
    arena._take(size // memory.granularity * memory.granularity)
    made_s = time.perf_counter() - start
    fds = arena.export()
    told = {"manifest": arena.manifest.fields(), "made_s": made_s, "used": _used(memory)}
    send_header(connection, told)
    send_fds(connection, fds)
    close_all(fds)
    address = probe.unsafe_buffer_pointer()
    while True:
        receive_header(connection)
        found = memory.read(address, PROBE.nbytes)  # not what an array has kept of itself
        send_header(connection, {"same": found == PROBE.tobytes()})


def _import(connection: socket.socket, memory: AbstractVirtualMemory) -> None:
    """Map the pages for reading, compute on them, and try to write where asked."""
    manifest = parse_manifest(receive_header(connection)["manifest"])
    fds, before = receive_fds(connection, len(manifest.blocks)), _used(memory)
    start = time.perf_counter()
    arena = ImportedArena(memory, manifest, fds)
    attach_s = time.perf_counter() - start
    close_all(fds)
    probe = arena.array("probe", PROBE.shape, PROBE.dtype)
    found = float(jax.jit(lambda x: jnp.sum(x[:4096]))(probe))
    told = {"attach_s": attach_s, "same": found == float(PROBE[:4096].sum()), "blocks": len(fds)}
    send_header(connection, told | {"used_before": before, "used": _used(memory)})
    ways = {"copy": _copy, "set": _set, "grant": _grant}
    while True:
        order = receive_header(connection)
        address = probe.unsafe_buffer_pointer() + 64
        done = _outcome(functools.partial(ways[order["write"]], memory, address, manifest))
        send_header(connection, {"outcome": done})


def _copy(memory: AbstractVirtualMemory, address: int, manifest: Manifest) -> None:
    """Copy to the address past the books of this package: the driver's own answer."""
    del manifest
    values = np.full(16, -1, np.float32)
    _driver(memory).copy_in(address, values.ctypes.data, values.nbytes)


def _set(memory: AbstractVirtualMemory, address: int, manifest: Manifest) -> None:
    """Have the driver's own kernel fill the address."""
    del manifest
    driver, cuda = _driver(memory), ctypes.CDLL("libcuda.so.1")
    with driver._current():
        for name, arguments in (
            ("cuMemsetD8_v2", (ctypes.c_uint64(address), ctypes.c_ubyte(9), ctypes.c_size_t(64))),
            ("cuCtxSynchronize", ()),
        ):
            if code := getattr(cuda, name)(*arguments):
                raise OSError(f"{name} gives {code}")


def _grant(memory: AbstractVirtualMemory, address: int, manifest: Manifest) -> None:
    """Take write access to the whole range, and write: the importer holds the pages."""
    start = address - 64 - manifest.leaves["probe"].offset
    _driver(memory).grant(start, manifest.num_bytes, Access.READ_WRITE)
    _copy(memory, address, manifest)


def _driver(memory: AbstractVirtualMemory) -> Any:
    if not hasattr(memory, "_driver"):
        raise NotImplementedError("host memory: see tests/unit/memory/test_arena.py")
    return memory._driver  # pyright: ignore[reportAttributeAccessIssue]


def _outcome(write: Callable[[], None]) -> str:
    try:
        write()
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}"[:200]
    return "written"


def _used(memory: AbstractVirtualMemory) -> int:
    return int(memory.usage().device_used or 0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as end:
        try:
            main(end, sys.argv[2])
        except OSError:
            os._exit(0)  # the other side has gone
