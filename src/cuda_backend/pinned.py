"""Host memory from which the driver copies by itself, at the rate of the bus.

Who pins an array leaves it as it is for as long as it lives; with it goes the driver's hold on it.
"""

import bisect
import ctypes
import logging
import threading
import weakref
from collections.abc import Callable

import numpy as np

from cuda_backend import driver as cuda
from lora_jax.memory.virtual import MappingError, OutOfPages

logger = logging.getLogger(__name__)

_SMALLEST = 1 << 20  # bytes; to pin fewer takes longer than it saves, and they share their pages


class PinnedArrays:
    """Registry of pinned host addresses; any thread may call it."""

    def __init__(self, call: Callable[..., None]):
        """`call` calls the driver in this device's context, as driver.Driver.call."""
        self._call, self._lock = call, threading.RLock()  # an array may go in any line of ours
        self._ranges: list[tuple[int, int]] = []  # (start, end), in order

    def pin(self, array: np.ndarray) -> None:
        """Pin the memory that the array is a view of, unless it is small, or not numpy's.

        What the driver refuses stays as it is.
        """
        while isinstance(array.base, np.ndarray):
            array = array.base
        start, size = array.ctypes.data, array.nbytes
        owned = array.base is None and array.flags.c_contiguous
        with self._lock:
            if not owned or size < _SMALLEST or self.holds(start, size):
                return
            try:
                self._call("cuMemHostRegister_v2", start, size, cuda.FOR_ALL_DEVICES)
            except (MappingError, OutOfPages, NotImplementedError) as error:
                logger.info("%d bytes are not pinned: %s", size, error)
                return
            bisect.insort(self._ranges, (start, start + size))
        weakref.finalize(array, self._forget, start, start + size).atexit = False

    def holds(self, address: int, num_bytes: int) -> bool:
        """True if all of these bytes are in one pinned array."""
        with self._lock:
            index = bisect.bisect_right(self._ranges, (address, 1 << 64)) - 1
            return index >= 0 and address + num_bytes <= self._ranges[index][1]

    def _forget(self, start: int, end: int) -> None:
        with self._lock:
            self._ranges.remove((start, end))
            self._call("cuMemHostUnregister", ctypes.c_void_p(start))
