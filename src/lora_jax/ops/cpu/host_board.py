"""The board on a CPU: a program sleeps in a C++ call until the host has posted its values."""

import ctypes
import functools

import jax
import numpy as np

from lora_jax.ops import native
from lora_jax.ops.cpu import build
from lora_jax.ops.host_board import HEADER_BYTES, AbstractHostBoard
from lora_jax.typing import Array, Int, UInt32

_SIGNATURES = {
    "post": (None, ctypes.c_void_p, ctypes.c_uint64),
    "set_patience": (None, ctypes.c_double),
}


class HostBoard(AbstractHostBoard):
    """One array of the host that programs on a CPU read when the host has posted it."""

    def __init__(self, count: int):
        """`count` is the number of int32 values; programs that wait must end before the board.

        Raises:
            Declined: the kernels are not there.
        """
        build.require()
        memory = np.zeros(2 * HEADER_BYTES + 4 * count, np.uint8)
        start = -memory.ctypes.data % HEADER_BYTES
        self._share(memory[start : start + HEADER_BYTES + 4 * count])
        self._post = calls().post

    def post(self, number: int) -> None:
        """Tell programs that the values of this number, 1 to 2**31 - 1, are written."""
        self._post(self._newest.ctypes.data, number)

    def read(
        self, address: UInt32[Array, "2"], number: Int[Array, "1"], after: Array
    ) -> Int[Array, "values"]:
        """Return the values of a number when they are posted and `after` is computed."""
        values = jax.ShapeDtypeStruct(self.values.shape, np.int32)
        return jax.ffi.ffi_call("lora_jax_read_board", values)(address, number, after)


@functools.cache
def calls() -> native.Calls:
    """Return the library's calls: `post`, and `set_patience`, by which tests wait shorter."""
    return native.Calls(build.loaded(), "lora_jax_board_", _SIGNATURES)
