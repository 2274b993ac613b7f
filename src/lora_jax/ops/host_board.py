"""Values in host memory that a program waits for, late in it.

So a program can be sent before the host knows the values. The memory begins with a header of eight
numbers of 64 bits: that of the newest values, then those of values that came too late. A number n
is told there at place n % 7, as few programs are out at a time.
"""

import abc

import numpy as np

from lora_jax.typing import Array, Int, UInt32

HEADER_BYTES = 64
ANY = 2**64 - 1  # as the newest number: every program goes on


class AbstractHostBoard(abc.ABC):
    """One array of the host, int32, that programs on one device read when the host has posted it.

    `values` is the array, of `count` numbers; `address` is uint32 [2], where the header lies.
    """

    def _share(self, memory: np.ndarray) -> None:
        """Use this memory: uint8, zeros, the header and 4 bytes a value, aligned to the header."""
        self._newest = memory[:8].view(np.uint64)
        self._late = memory[8:HEADER_BYTES].view(np.uint64)
        self.values = memory[HEADER_BYTES:].view(np.int32)
        address = memory.ctypes.data
        self.address = np.array([address & 0xFFFFFFFF, address >> 32], np.uint32)

    @abc.abstractmethod
    def post(self, number: int) -> None:
        """Tell programs that the values of this number, 1 to 2**31 - 1, are written.

        They must stay as they are until the program that waits for them has ended.
        """

    def end(self) -> None:
        """Let every program go on that waits, or will: nobody may post any more."""
        self.post(ANY)

    def was_late(self, number: int) -> bool:
        """Return whether a program that has ended went on without the values of this number."""
        return bool(self._late[number % len(self._late)] == number)

    @abc.abstractmethod
    def read(
        self, address: UInt32[Array, "2"], number: Int[Array, "1"], after: Array
    ) -> Int[Array, "values"]:
        """Return the values of a number when they are posted and `after` is computed.

        Number 0 waits for nothing and gives -1s; so do values that are 20 seconds late.
        `address` is an array of the device with this board's address: a program that is kept in a
        file serves other boards too.
        """
