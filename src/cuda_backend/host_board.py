"""Values in host memory that a program on the device waits for, by csrc/host_board.

So a step can be sent to the device before the host knows what it needs late in the step.
"""

import ctypes
import platform

import jax
import numpy as np

from cuda_backend import ffi
from cuda_backend.peer_memory import Device
from lora_jax.ops.host_board import HEADER_BYTES, AbstractHostBoard
from lora_jax.typing import Array, Int, UInt32

_MACHINES = "x86_64", "AMD64"  # whose stores other devices see in their order


class HostBoard(AbstractHostBoard):
    """One array of the host that the device reads in place when the host has posted it."""

    def __init__(self, count: int, device: int = 0):
        """`count` is the number of int32 values; their memory is kept until the process ends.

        Raises:
            Declined: the kernels are not there.
            NotImplementedError: the driver has no memory that host and device share, or the host's
                processor is none of x86-64, which alone keeps the order of its stores.
        """
        if platform.machine() not in _MACHINES:
            raise NotImplementedError(
                f"{platform.machine()} may show a number before the values it stands for; "
                f"only {' and '.join(_MACHINES)} keep the order"
            )
        ffi.require()
        num_bytes = HEADER_BYTES + 4 * count
        address = Device(device).allocate_host(num_bytes)
        self._share(np.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), np.uint8))

    def post(self, number: int) -> None:
        """See AbstractHostBoard."""
        self._newest[0] = number

    def read(
        self, address: UInt32[Array, "2"], number: Int[Array, "1"], after: Array
    ) -> Int[Array, "values"]:
        """See AbstractHostBoard. Traced."""
        values = jax.ShapeDtypeStruct(self.values.shape, np.int32)
        state = jax.ShapeDtypeStruct((1,), np.int32)
        call = jax.ffi.ffi_call("lora_jax_cuda_read_board", (values, state))
        return call(address, number, after)[0]
