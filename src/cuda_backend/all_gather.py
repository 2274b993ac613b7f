"""All-gather and all-to-all between the GPUs of one process by peer pointers (csrc/all_gather).

A `GatherGroup` owns a memory on each GPU that the other GPUs write into; large results are written
where XLA has them. Programs name the group by its number, so a group stays until the process ends.
"""

import ctypes
import functools
import os
from collections.abc import Sequence

import jax
import numpy as np

from cuda_backend import ffi
from cuda_backend.peer_memory import Device, Landing, create_landing
from lora_jax.ops import dispatch, native
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int

MOST_DEVICES = 8  # csrc/all_gather
UNIT = 16  # bytes that a kernel moves at once
PATIENCE_NS = 10_000_000_000  # a peer that takes longer is lost
_PREFIX = "lora_jax_cuda_gather_"
_WHOLE, _COLUMNS, _ROWS = range(3)  # GatherParts of csrc/all_gather: what a peer gets of x
_I32, _I64, _P = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_CALLS = {
    "bytes": (_I64, _I64),
    "status_offset": (_I64,),
    "load": (_I32, _I64),
    "reach": (_I32, _I64),
    "new": (_I64, _I64, _P),
}


class PeerLost(RuntimeError):
    """A GPU of a group did not answer in time: results since then are not valid.

    Each wait of the group ends at once from then on, and a GPU that comes later writes nothing into
    results that were given up. Only one that stands still between its first write of a large
    exchange and its last, for longer than the others wait, still does: the process should end.
    """


@functools.cache
def _calls() -> native.Calls:
    ffi.require()
    path = ffi.library().build(dispatch.cache_folder())
    return native.Calls(ctypes.CDLL(str(path)), _PREFIX, _CALLS)


class GatherGroup:
    """The first `devices` GPUs of this process, joined for `all_gather`."""

    def __init__(self, devices: int):
        """Allocate the group's memory and load its kernels on each GPU.

        Raises:
            ValueError: fewer than 2 devices, more than the kernels take, more than there are, or
                a GPU that cannot reach another one's memory.
            NotImplementedError: there is no Hopper GPU, or no kernels, or XLA's memory is of a kind
                that other GPUs do not reach.
        """
        if not 2 <= devices <= MOST_DEVICES:
            raise ValueError(f"a group has 2 to {MOST_DEVICES} devices, got {devices}")
        if devices > len(jax.local_devices()):
            available = len(jax.local_devices())
            raise ValueError(
                f"a group of {devices} devices needs as many GPUs; there are {available}"
            )
        calls = _calls()
        self._devices = [Device(number) for number in range(devices)]
        self._memories = [_memory(device, self._devices, calls) for device in self._devices]
        self._status_offset = calls.status_offset()
        addresses = np.array([memory.address for memory in self._memories], np.uint64)
        self.number = calls.new(devices, addresses.ctypes.data)
        self.size = devices

    def check(self) -> None:
        """Raise PeerLost if a GPU has waited in vain for another one."""
        for device, memory in zip(self._devices, self._memories, strict=True):
            status = device.read(memory.address + self._status_offset, 4)
            if peer := int.from_bytes(status, "little"):
                raise PeerLost(
                    f"GPU {device.number} got no answer from GPU {peer - 1}: what they exchanged "
                    "since is not valid; start this process anew"
                )


def _memory(device: Device, group: Sequence[Device], calls: native.Calls) -> Landing:
    """Return zeroed memory of a GPU, mapped for all GPUs of the group."""
    for peer in group:
        device.number_of(peer.identity)  # raises where there is no way
    with device.current():
        if code := calls.load(len(group)):
            raise NotImplementedError(f"the all-gather kernels do not load: CUDA error {code}")
        for peer in group:
            if peer is not device and (code := calls.reach(peer.number)):
                reason = f"GPU {device.number} does not reach GPU {peer.number}: CUDA error {code}"
                raise NotImplementedError(reason)
    _check_allocator(device)
    users = [peer.number for peer in group]
    memory, fd = create_landing(device, device.number, calls.bytes(len(group)), users)
    os.close(fd)
    return memory


def _check_allocator(device: Device) -> None:
    """Raise NotImplementedError where results of programs lie in memory that has no peers."""
    probe = jax.device_put(np.zeros(64, np.int32), jax.local_devices()[device.number])
    if not device.is_plain(probe.unsafe_buffer_pointer()):
        raise NotImplementedError(
            "the all-gather kernels write into memory of cuMemAlloc, which XLA's is not: leave "
            "XLA_PYTHON_CLIENT_ALLOCATOR and TF_GPU_ALLOCATOR at their defaults"
        )


_GROUPS: dict[int, GatherGroup] = {}  # by size: their memories stay as long as the process


def gather_group(devices: int) -> GatherGroup:
    """Return the group over the first GPUs of this process; raises as GatherGroup does.

    Raises:
        PeerLost: a GPU of the group was lost before, so no exchange of it is valid any more.
    """
    if devices not in _GROUPS:
        _GROUPS[devices] = GatherGroup(devices)
    _GROUPS[devices].check()
    return _GROUPS[devices]


def all_gather(
    x: Float[Array, "rows columns"], axis_name: str, group: int
) -> Float[Array, "rows all_columns"]:
    """Return the columns of all devices; see lora_jax.ops.all_gather."""
    return _exchanged("all_gather", x, axis_name, group, x.shape, _WHOLE)


def all_to_all(
    x: Float[Array, "rows columns"], axis_name: str, group: int
) -> Float[Array, "rows columns"]:
    """Return this device's part of the columns of all devices; see lora_jax.ops.all_to_all."""
    part = x.shape[0], x.shape[1] // jax.lax.axis_size(axis_name)
    return _exchanged("all_to_all", x, axis_name, group, part, _COLUMNS)


def all_to_all_rows(
    x: Float[Array, "rows columns"], axis_name: str, group: int
) -> Float[Array, "own_rows all_columns"]:
    """Return this device's rows of the columns of all; see lora_jax.ops.all_to_all_rows."""
    part = x.shape[0] // jax.lax.axis_size(axis_name), x.shape[1]
    return _exchanged("all_to_all_rows", x, axis_name, group, part, _ROWS)


def all_to_all_owned(
    x: Float[Array, "own_rows columns"],
    source: Int[Array, "rows"],
    owner: Int[Array, "rows"],
    axis_name: str,
    group: int,
) -> Float[Array, "rows part"]:
    """Return this device's columns of their owners' rows; see lora_jax.ops.all_to_all_owned."""
    width = x.shape[1] // jax.lax.axis_size(axis_name)
    _require("all_to_all_owned", x, group, width)
    result = jax.ShapeDtypeStruct((source.shape[0], width), x.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_all_to_all_owned", result)
    return call(x, source, owner, group=np.int64(group), patience=np.int64(PATIENCE_NS))


def _require(op: str, x: Float[Array, "_ _"], group: int, width: int) -> None:
    """Raise Declined, saying why, for what the kernels do not exchange."""
    if not group:
        raise Declined(f"cuda {op} needs a GatherGroup, not group 0")
    if width * x.dtype.itemsize % UNIT:
        raise Declined(f"cuda {op} takes rows in units of {UNIT} bytes, not {width} x {x.dtype}")
    ffi.require()


def _exchanged(
    op: str,
    x: Float[Array, "_ _"],
    axis_name: str,
    group: int,
    part: tuple[int, ...],
    what: int,
) -> Float[Array, "rows _"]:
    """Return [rows, devices * width]: the parts [rows, width] that the devices send to this one."""
    rows, width = part
    _require(op, x, group, width)
    shape = (rows, width * jax.lax.axis_size(axis_name))
    call = jax.ffi.ffi_call("lora_jax_cuda_all_gather", jax.ShapeDtypeStruct(shape, x.dtype))
    numbers = {"group": group, "patience": PATIENCE_NS, "parts": what}
    return call(x, **{name: np.int64(number) for name, number in numbers.items()})
