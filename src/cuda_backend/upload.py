"""Copies from the host's pageable memory at the rate of pinned memory.

The driver's own copy from pageable memory goes through one small pinned buffer and one thread. Here
several threads fill pinned buffers of their own, each on a stream of its own, while the pages under
later bytes are still being mapped. What lies in pinned memory (cuda_backend.pinned) needs neither.
"""

import contextlib
import ctypes
import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_void_p

import numpy as np

from cuda_backend import driver as cuda
from cuda_backend.pinned import PinnedArrays
from lora_jax.memory.virtual import OutOfPages

logger = logging.getLogger(__name__)

THREADS = 8
BUFFER_BYTES = 8 << 20
BUFFERS = 2 * THREADS  # one is filled while the other's copy runs


class Uploader:
    """Copies to one device; `begin` may be called by several threads at a time."""

    def __init__(self, driver: cuda.Driver, context: c_void_p):
        """Take pinned memory, which stays for the rest of the process: fewer buffers than BUFFERS
        where the host has no room for all.

        Raises what `driver` raises; OutOfPages where there is no room for one.
        """
        self._driver, self._call, self._context = driver, driver.call, context
        self._pinned_arrays = PinnedArrays(self._call_in_context)
        self._owners: list[object] = []  # of pinned memory that is being copied
        self._buffers: queue.SimpleQueue[tuple[int, c_void_p]] = queue.SimpleQueue()
        self._streams: list[c_void_p] = []
        self._lock = threading.Lock()
        self._under_way: dict[Future, object] = {}  # copies, and who owns their bytes
        with self._current():
            for buffer in self._take_buffers():
                self._streams.append(self._stream())
                self._buffers.put((buffer, self._streams[-1]))
            self._direct = self._stream()
            self._streams.append(self._direct)
        self._threads = ThreadPoolExecutor(THREADS, "upload", initializer=self._enter)

    def begin(self, address: int, host_address: int, num_bytes: int, owner: object) -> None:
        """Copy to the device some time before `finish` returns; `owner` lives until then."""
        if self._pinned_arrays.holds(host_address, num_bytes):
            copy = address, host_address, num_bytes, self._direct
            self._call_in_context("cuMemcpyHtoDAsync_v2", *copy)
            with self._lock:  # behind the copy, or a `finish` between them would let the owner go
                self._owners.append(owner)
            return
        for start in range(0, num_bytes, BUFFER_BYTES):
            size = min(BUFFER_BYTES, num_bytes - start)
            task = self._threads.submit(self._copy, address + start, host_address + start, size)
            with self._lock:
                self._under_way[task] = owner

    def pin(self, array: np.ndarray) -> None:
        """Let copies out of the memory under an array need no other; see PinnedArrays.pin."""
        self._pinned_arrays.pin(array)

    def is_done(self) -> bool:
        """True if `finish` would return at once."""
        with self._lock:
            copied = all(task.done() for task in self._under_way)
        with self._current():
            return copied and all(map(self._driver.is_idle, self._streams))

    def finish(self) -> None:
        """Return when all copies are complete, of all threads; raise the first error."""
        with self._lock:
            tasks, owners = list(self._under_way), len(self._owners)
        errors = [error for task in tasks if (error := task.exception())]
        with self._current():
            for stream in self._streams:
                try:
                    self._call("cuStreamSynchronize", stream)
                except Exception as error:
                    errors.append(error)
        with self._lock:  # only now: who else waits has to wait for them, too
            for task in tasks:
                self._under_way.pop(task, None)
            del self._owners[:owners]
        if errors:
            raise errors[0]

    def _copy(self, address: int, host_address: int, num_bytes: int) -> None:
        buffer, stream = self._buffers.get()
        try:
            self._call("cuStreamSynchronize", stream)  # what was in the buffer has left it
            ctypes.memmove(buffer, host_address, num_bytes)
            self._call("cuMemcpyHtoDAsync_v2", address, buffer, num_bytes, stream)
        finally:
            self._buffers.put((buffer, stream))

    def _call_in_context(self, name: str, *arguments: object) -> None:
        with self._current():
            self._call(name, *arguments)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _enter(self) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)

    def _take_buffers(self) -> list[int]:
        """Return the addresses of as many buffers as there is room for."""
        buffers: list[int] = []
        while len(buffers) < BUFFERS:
            try:
                buffers.append(self._pinned())
            except OutOfPages as error:
                if not buffers:
                    raise
                logger.info("Copies have %d of %d buffers: %s", len(buffers), BUFFERS, error)
                break
        return buffers

    def _pinned(self) -> int:
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), BUFFER_BYTES, cuda.FOR_ALL_DEVICES)
        assert address.value is not None, "cuMemHostAlloc answers success and no address"
        return address.value

    def _stream(self) -> c_void_p:
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), cuda.NON_BLOCKING)
        return stream
