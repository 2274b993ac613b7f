"""Copies rank rows into arrays of the CPU, in place of the programs that would write them there.

A program writes row by row, the steps behind it wait, and the host puts its rows together before.
"""

import ctypes
from typing import Any

import numpy as np


class HostCopier:
    """A `row_copies.Copier` of one CPU device, whose copies have arrived when they have begun."""

    chunk_bytes = 1 << 20  # which the engine's thread copies itself

    def begin_write_into(self, array: Any, offset: int, data: np.ndarray) -> None:
        """Write rows as the array's dtype to `offset`, in bytes, of an array of a CPU.

        ValueError: the array is too short.
        """
        num_bytes = data.size * array.dtype.itemsize
        if offset < 0 or offset + num_bytes > array.nbytes:
            raise ValueError(
                f"Bytes {offset} to {offset + num_bytes} are not in an array of {array.nbytes}."
            )
        place = (ctypes.c_char * num_bytes).from_address(array.unsafe_buffer_pointer() + offset)
        rows = np.frombuffer(place, array.dtype).reshape(data.shape)
        np.copyto(rows, data, casting="unsafe")  # which converts without a copy in between

    def pin(self, data: np.ndarray) -> None:
        """Do nothing: all of the host's memory copies at the same rate."""

    def writes_done(self) -> bool:
        """Return True."""
        return True

    def finish_writes(self) -> None:
        """Do nothing."""
