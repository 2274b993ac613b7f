"""The C++ end of the transport, built at first use, and memory that two processes share."""

import ctypes
import fcntl
import functools
import os
import sys
from pathlib import Path

from lora_jax.ops import dispatch, native
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.shapes import Shapes

PUSH, WAIT_ADD = TARGETS = ("lora_jax_transport_push", "lora_jax_transport_wait_add")
_PREFIX = "lora_jax_transport_"
_I32, _I64, _U64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
_POINTER = ctypes.c_void_p
_CALLS = {  # name -> result, arguments; see csrc/handlers.cc
    "seal": (None, _POINTER),
    "read": (_I32, _POINTER, _POINTER),
    "client_new": (_I64, _POINTER, _I64, _I32, _I32),
    "client_group": (_I64, _POINTER, _I64),
    "client_attach": (_I32, _I64, _I64, _I32, _I32, _U64),
    "client_detach": (None, _I64, _I64, _U64),
    "client_ring": (_I32, _I64, _I32),
    "client_lost": (_I32, _I64, _I64),
    "client_limit": (None, _I64, _U64),
    "client_abort": (None, _I64, _I32),
    "client_counts": (None, _I64, _POINTER),
    "client_free": (None, _I64),
    "server_new": (_I64, _POINTER, _I32),
    "server_attach": (_I64, _I64, _I32, _U64),
    "server_ring": (_I32, _I64, _I32, _U64),
    "server_detach": (None, _I64, _I64),
    "server_receive": (_I64, _I64, _U64, _POINTER),
    "server_answer": (_I32, _I64, _I64, _POINTER, _POINTER),
    "server_tenant": (_I64, _I64, _POINTER, _POINTER),
    "server_abort": (None, _I64),
    "server_dropped": (_U64, _I64),
    "server_free": (None, _I64),
    "wait": (_U64, _U64, _U64, _U64),
    "step": (None, _U64, _U64),
    "ring": (None, _U64),
    "relay": (_I32, _POINTER, _I32, _I32, _I32, _U64, _I32),
}
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@functools.cache
def calls() -> native.Calls:
    """Return the library's calls; its custom calls are registered with XLA.

    Raises:
        NotImplementedError: this is not Linux (futex, memfd).
        BuildError: there is no C++ compiler, or it fails.
    """
    if sys.platform != "linux":
        raise NotImplementedError(
            f"the transport between processes needs Linux, not {sys.platform}"
        )
    folder = Path(__file__).parent / "csrc"
    library = native.cpp_library("transport", "transport", folder, TARGETS)
    return native.Calls(library.load(dispatch.cache_folder()), _PREFIX, _CALLS)


def numbers(shapes: Shapes) -> ctypes.Array:
    """Return what the C++ end knows of the shapes, in its order (csrc/channel.h)."""
    values = [
        shapes.layers,
        shapes.max_rows,
        shapes.row_dtype.itemsize,
        shapes.result_dtype.itemsize,
        shapes.adapters_offset,
        shapes.experts_offset,
        shapes.rows_offset,
        shapes.request_slot,
        shapes.response_slot,
        len(shapes.sites),
    ]
    for index, site in enumerate(shapes.sites):
        values += [site.d_in, len(site.d_outs)]
        for width, offset in zip(site.d_outs, shapes.result_offsets(index), strict=True):
            values += [width, offset]
    return (_I64 * len(values))(*values)


def shared_memory(num_bytes: int) -> int:
    """Return the descriptor of memory without a name, all zero, whose size nobody can change.

    It ends with the last process that has it; pages are taken when first written.
    """
    fd = os.memfd_create("lora_jax_transport", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_memory(fd: int, num_bytes: int) -> None:
    """Raise TransportError unless a descriptor from another process is such memory.

    Memory that can shrink would kill whoever reads past its end.
    """
    try:
        seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
    except OSError as error:
        raise TransportError(f"the peer sent a descriptor that is not memory: {error}") from error
    if seals & _SEALS != _SEALS or size != num_bytes:
        raise TransportError(
            f"the peer sent memory of {size} bytes with seals {seals:#x}, expected {num_bytes} "
            f"bytes with seals {_SEALS:#x}"
        )
