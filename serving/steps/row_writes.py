"""Rows of new sequences on their way into the state: by a program, or by the host itself.

A program for it costs the thread that plans steps 45 us, as much as the step's own call does. On a
CPU the state lies where the host can write, and a request that comes alone meets no step in flight.
"""

import ctypes

import jax
import numpy as np

from lora_jax.adapters.row_copies import has_ended
from serving.steps.device_state import PackedPrompt, PackedRow, RowState, admit, parts_of


class RowWrites:
    """Writes rows of one engine's state, which steps alone read; the runner's thread uses it."""

    def __init__(self, *, by_host: bool):
        """With `by_host` the state lies in the memory of this process, on one device."""
        self._by_host = by_host
        self._views: dict[int, tuple[int, np.ndarray]] = {}  # of arrays by place: address, array

    def admit(self, state: RowState, row: int, packed: PackedRow | PackedPrompt) -> RowState:
        """Return `state` (donated, or written to) with row `row` taken over by a packed sequence.

        The host writes where every array is there: a step returns the history, so none runs then.
        """
        arrays = state.history, state.key, state.ints, state.floats
        is_prompt = isinstance(packed, PackedPrompt)  # which writes the history alone
        written = arrays[:1] if is_prompt else arrays
        # Looked at once: a step may end between two looks.
        if not (self._by_host and all(map(has_ended, written))):
            return admit(state, row, packed)
        if is_prompt:
            self._writable(0, state.history)[row, : len(packed.tokens)] = packed.tokens
            return state
        for place, values in enumerate(parts_of(packed)):
            self._writable(place, arrays[place])[row] = values
        return state

    def _writable(self, place: int, array: jax.Array) -> np.ndarray:
        """Return the state's array of this place as one that the host can write to."""
        address, view = array.unsafe_buffer_pointer(), self._views.get(place)
        if view is None or view[0] != address:
            view = self._views[place] = address, _view(address, array)
        return view[1]


def _view(address: int, array: jax.Array) -> np.ndarray:
    memory = (ctypes.c_char * array.nbytes).from_address(address)
    return np.frombuffer(memory, array.dtype).reshape(array.shape)
