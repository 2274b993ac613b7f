"""Copies from the host's pageable memory at the rate of pinned memory.

The driver's own copy from pageable memory goes through one small pinned buffer and one thread. Here
several threads fill pinned buffers of their own, each on a stream of its own, while the pages under
later bytes are still being mapped: some threads copy while the bytes of others are on the bus.
"""

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_void_p

from cuda_backend import driver as cuda

THREADS = 16
BUFFER_BYTES = 8 << 20
BUFFERS = THREADS


class Uploader:
    """Copies to one device; `begin` may be called by several threads at a time."""

    def __init__(self, call: Callable[..., None], context: c_void_p):
        """Take pinned memory, which stays for the rest of the process.

        `call` calls the driver, as driver.Driver.call; raises what that raises.
        """
        self._call, self._context = call, context
        self._buffers: queue.SimpleQueue[tuple[int, c_void_p]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._under_way: dict[Future, object] = {}  # copies, and who owns their bytes
        with self._current():
            for _ in range(BUFFERS):
                self._buffers.put((self._pinned(), self._stream()))
        self._threads = ThreadPoolExecutor(THREADS, "upload", initializer=self._enter)

    def begin(self, address: int, host_address: int, num_bytes: int, owner: object) -> None:
        """Copy to the device some time before `finish` returns; `owner` lives until then."""
        for start in range(0, num_bytes, BUFFER_BYTES):
            size = min(BUFFER_BYTES, num_bytes - start)
            task = self._threads.submit(self._copy, address + start, host_address + start, size)
            with self._lock:
                self._under_way[task] = owner

    def is_done(self) -> bool:
        """Whether `finish` would return at once."""
        with self._lock:
            return all(task.done() for task in self._under_way)

    def finish(self) -> None:
        """Return when all bytes are there, whoever began their copies; raise the first error."""
        with self._lock:
            tasks = list(self._under_way)
        errors = [error for task in tasks if (error := task.exception())]
        with self._lock:  # only now: who else waits has to wait for them, too
            for task in tasks:
                self._under_way.pop(task, None)
        if errors:
            raise errors[0]

    def _copy(self, address: int, host_address: int, num_bytes: int) -> None:
        buffer, stream = self._buffers.get()
        try:
            ctypes.memmove(buffer, host_address, num_bytes)
            self._call("cuMemcpyHtoDAsync_v2", address, buffer, num_bytes, stream)
            self._call("cuStreamSynchronize", stream)
        finally:
            self._buffers.put((buffer, stream))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _enter(self) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)

    def _pinned(self) -> int:
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), BUFFER_BYTES, cuda.FOR_ALL_DEVICES)
        assert address.value is not None, "cuMemHostAlloc answers success and no address"
        return address.value

    def _stream(self) -> c_void_p:
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), cuda.NON_BLOCKING)
        return stream
