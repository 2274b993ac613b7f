"""Virtual memory of an NVIDIA GPU: cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess.

Reading an address without a page ends the CUDA context, so no kernel may touch a hole. Unmapping
does not wait for kernels. XLA takes the addresses of all arguments of a program for memory, holes
included; where that is more than there is, it computes things twice to save some, unless its pass
`rematerialization` is switched off.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import numpy as np

from cuda_backend import driver as cuda
from cuda_backend.upload import Uploader
from lora_jax.memory import dlpack
from lora_jax.memory.driver import AbstractDriver
from lora_jax.memory.virtual import Access
from lora_jax.typing import Array


class CudaDriver(AbstractDriver):
    """The calls for one device of the driver library."""

    def __init__(self, device: int = 0, library: str = cuda.LIBRARY):
        """Raise NotImplementedError where driver or device have no such memory."""
        self._cuda = cuda.Driver(library)
        self._number = device
        ordinal = c_int()
        self._cuda.call("cuDeviceGet", byref(ordinal), device)
        if not self._attribute(cuda.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, ordinal):
            raise NotImplementedError(f"CUDA device {device} has no virtual memory management")
        shares = self._attribute(cuda.HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, ordinal)
        self._handle_type = cuda.POSIX_FD if shares else 0
        self._location = cuda.Location(cuda.ON_DEVICE, device)
        self._prop = cuda.AllocationProp(cuda.PINNED, self._handle_type, self._location)
        # The context that XLA uses; retained for the rest of the process, as XLA does.
        self._context = c_void_p()
        self._cuda.call("cuDevicePrimaryCtxRetain", byref(self._context), ordinal)
        size = c_size_t()
        self._cuda.call(
            "cuMemGetAllocationGranularity", byref(size), byref(self._prop), cuda.MINIMUM
        )
        self._granularity = size.value
        self._upload_lock = threading.Lock()
        self._uploader: Uploader | None = None  # whose pinned memory only loads need
        self._clears: c_void_p | None = None  # the stream of clears that nobody waits for

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, num_bytes: int) -> int:
        address = c_uint64()
        self._cuda.call("cuMemAddressReserve", byref(address), num_bytes, self._granularity, 0, 0)
        return address.value

    def release(self, address: int, num_bytes: int) -> None:
        self._cuda.call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> int:
        handle = c_uint64()
        self._cuda.call("cuMemCreate", byref(handle), num_bytes, byref(self._prop), 0)
        return handle.value

    def destroy(self, handle: int) -> None:
        self._cuda.call("cuMemRelease", handle)

    def map(self, address: int, handle: int, num_bytes: int) -> None:
        self._cuda.call("cuMemMap", address, num_bytes, 0, handle, 0)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._cuda.call("cuMemUnmap", address, num_bytes)

    def grant(self, address: int, num_bytes: int, access: Access) -> None:
        desc = cuda.AccessDesc(self._location, access.value)
        self._cuda.call("cuMemSetAccess", address, num_bytes, byref(desc), 1)

    def export_fd(self, handle: int) -> int:
        if not self._handle_type:
            raise NotImplementedError(f"CUDA device {self._number} exports no file descriptors")
        fd = c_int(-1)
        self._cuda.call("cuMemExportToShareableHandle", byref(fd), handle, self._handle_type, 0)
        return fd.value

    def import_fd(self, fd: int, num_bytes: int) -> int:
        handle = c_uint64()
        self._cuda.call("cuMemImportFromShareableHandle", byref(handle), fd, cuda.POSIX_FD)
        return handle.value

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> None:
        with self._current():
            self._cuda.call("cuMemcpyHtoD_v2", address, host_address, num_bytes)
            # From pageable memory the call may return before the last bytes have arrived. XLA's
            # streams do not take part in the legacy stream, so this waits for no kernel.
            self._cuda.call("cuStreamSynchronize", None)

    def begin_copy_in(self, address: int, host_address: int, num_bytes: int, owner: object) -> None:
        self._make_uploader().begin(address, host_address, num_bytes, owner)

    def pin(self, array: np.ndarray) -> None:
        self._make_uploader().pin(array)

    def _make_uploader(self) -> Uploader:
        with self._upload_lock:
            if self._uploader is None:
                self._uploader = Uploader(self._cuda, self._context)
            return self._uploader

    def copies_done(self) -> bool:
        return self._uploader is None or self._uploader.is_done()

    def finish_copies(self) -> None:
        if self._uploader is not None:
            self._uploader.finish()

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        with self._current():
            self._cuda.call("cuMemcpyDtoH_v2", host_address, address, num_bytes)

    def copy_within(self, address: int, source: int, num_bytes: int) -> None:
        with self._current():
            self._cuda.call("cuMemcpyDtoD_v2", address, source, num_bytes)
            self._cuda.call("cuStreamSynchronize", None)  # the call itself does not wait

    def clear(self, address: int, num_bytes: int) -> None:
        with self._current():
            self._cuda.call("cuMemsetD8Async", address, 0, num_bytes, None)
            self._cuda.call("cuStreamSynchronize", None)

    def begin_clear(self, address: int, num_bytes: int) -> None:
        """Clear beside the kernels that run, before those of them whose blocks still wait."""
        with self._current():
            if self._clears is None:
                stream = c_void_p()
                how = cuda.NON_BLOCKING, cuda.HIGHEST_PRIORITY
                self._cuda.call("cuStreamCreateWithPriority", byref(stream), *how)
                self._clears = stream
            self._cuda.call("cuMemsetD8Async", address, 0, num_bytes, self._clears)

    def finish_clears(self) -> None:
        if self._clears is not None:
            with self._current():
                self._cuda.call("cuStreamSynchronize", self._clears)

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return dlpack.foreign_array(address, shape, dtype, (dlpack.CUDA, self._number))

    def device_used(self) -> int:
        free, total = self._device_memory()
        return total - free

    def device_free(self) -> int:
        return self._device_memory()[0]

    def _device_memory(self) -> tuple[int, int]:
        """Return the bytes of the device that are free, and all."""
        free, total = c_size_t(), c_size_t()
        with self._current():
            self._cuda.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def _attribute(self, attribute: int, ordinal: ctypes.c_int) -> int:
        value = c_int()
        self._cuda.call("cuDeviceGetAttribute", byref(value), attribute, ordinal)
        return value.value

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context this thread's for a while; copies need one."""
        self._cuda.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._cuda.call("cuCtxPopCurrent_v2", byref(c_void_p()))
