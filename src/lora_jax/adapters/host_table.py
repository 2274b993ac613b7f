"""The table of adapter slots on a CPU, which the host writes where it lies, between the steps.

A program that writes an entry, and one that tells when earlier programs have ended, cost the thread
that plans steps as much as the copy of a small adapter. Here the counts of steps say when none of
them can read what is written.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lora_jax.adapters.lora_allocator import LoraPlacement
from lora_jax.adapters.slots import AdapterSlots


class HostTable:
    """Writes entries of slots on one CPU device; for an engine in which steps alone read slots."""

    def __init__(self) -> None:
        self.dispatched = 0  # steps that were sent so far
        self._read = 0  # steps whose results have come back

    def note(self, dispatched: int, read: int) -> None:
        """Note how many steps were sent so far, and of how many the results have come back."""
        self.dispatched, self._read = dispatched, read

    def has_read(self, count: int) -> bool:
        """Return whether the results of the first `count` steps have come back."""
        return self._read >= count

    def clear(self, slots: AdapterSlots, cleared: Sequence[int]) -> None:
        """Zero the entries of slots, as `slots.clear_slots` does."""
        for slot in cleared:
            self._write(slots, slot, 0, 0, -1)

    def publish(self, slots: AdapterSlots, placement: LoraPlacement) -> None:
        """Write a placement's entries, as `slots.publish` does."""
        values = placement.entries, placement.scaling, placement.token_ids
        self._write(slots, placement.slot, *values)

    def _write(
        self, slots: AdapterSlots, slot: int, entries: Any, scaling: Any, token_ids: Any
    ) -> None:
        """Write what one slot has, which no step may use whose results have not come back."""
        _writable(slots.entries)[:, :, slot] = entries
        _writable(slots.scaling)[:, :, slot] = scaling
        if slots.token_ids is not None and slots.token_ids.size:
            _writable(slots.token_ids)[:, slot] = token_ids


def _writable(array: Any) -> np.ndarray:
    """Return a jax.Array's own memory, when the program that made it has ended."""
    if not array.is_ready():  # to wait hands Python's lock to threads that read files
        jax.block_until_ready(array)
    memory = (ctypes.c_char * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memory, array.dtype).reshape(array.shape)
