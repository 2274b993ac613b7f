"""Rows of new sequences on their way into the state: by a program, or by the host itself.

A program for it costs the thread that plans steps 45 us, as much as the step's own call does. On a
CPU the state lies where the host can write, and a request that comes alone meets no step in flight.
"""

import ctypes

import jax
import numpy as np

from lora_jax.adapters.row_copies import has_ended
from serving.steps.device_state import PackedRow, RowState, admit, parts_of


class RowWrites:
    """Writes rows of one engine's state, which steps alone read; the runner's thread uses it."""

    def __init__(self, *, by_host: bool):
        """With `by_host` the state lies in the memory of this process, on one device."""
        self._by_host = by_host
        self._addresses: tuple[int, ...] = ()
        self._views: tuple[np.ndarray, ...] = ()  # of the arrays at these addresses

    def admit(self, state: RowState, row: int, packed: PackedRow) -> RowState:
        """Return `state` (donated, or written to) with row `row` taken over by a packed sequence.

        The host writes where every array is there: a step returns the history, so none runs then.
        """
        arrays = state.history, state.key, state.ints, state.floats
        if not (self._by_host and all(map(has_ended, arrays))):
            return admit(state, row, packed)
        for view, values in zip(self._writable(arrays), parts_of(packed), strict=True):
            view[row] = values
        return state

    def _writable(self, arrays: tuple[jax.Array, ...]) -> tuple[np.ndarray, ...]:
        addresses = tuple(array.unsafe_buffer_pointer() for array in arrays)
        if addresses != self._addresses:
            pairs = zip(addresses, arrays, strict=True)
            self._views = tuple(_view(address, array) for address, array in pairs)
            self._addresses = addresses
        return self._views


def _view(address: int, array: jax.Array) -> np.ndarray:
    memory = (ctypes.c_char * array.nbytes).from_address(address)
    return np.frombuffer(memory, array.dtype).reshape(array.shape)
