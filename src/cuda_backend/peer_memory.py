"""Memory of one GPU that other GPUs of the host reach too, in this process or another.

A landing is physical memory of one device (cuMemCreate), mapped for every device that reads or
writes it (cuMemSetAccess) and passed to other processes as a file descriptor. Whoever has mapped it
keeps it: a process that dies takes nothing from under its peer.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from cuda_backend import driver as cuda
from lora_jax.memory.virtual import Access


class Device:
    """One GPU of this process: its context, and a stream beside XLA's for the host's copies."""

    def __init__(self, number: int, library: str = cuda.LIBRARY):
        """`number` counts the GPUs that this process sees.

        Raises NotImplementedError where driver or device cannot share memory.
        """
        self.cuda, self.number = cuda.Driver(library), number
        self._ordinal = c_int()
        self.cuda.call("cuDeviceGet", byref(self._ordinal), number)
        if not self._attribute(cuda.HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED):
            raise NotImplementedError(f"CUDA device {number} exports no file descriptors")
        # The context that XLA uses; retained for the rest of the process, as XLA does.
        self._context = c_void_p()
        self.cuda.call("cuDevicePrimaryCtxRetain", byref(self._context), self._ordinal)
        self._stream = self.new_stream()
        self._lock = threading.Lock()  # one copy of the host's at a time

    @property
    def identity(self) -> str:
        """Return the GPU's UUID in hexadecimal: the same in every process."""
        return _uuid(self.cuda, self._ordinal)

    def number_of(self, identity: str) -> int:
        """Return this process's number of a GPU that this one reaches directly.

        Raises ValueError, saying what to change, where there is none.
        """
        count = c_int()
        self.cuda.call("cuDeviceGetCount", byref(count))
        for number in range(count.value):
            ordinal = c_int()
            self.cuda.call("cuDeviceGet", byref(ordinal), number)
            if _uuid(self.cuda, ordinal) != identity:
                continue
            if number != self.number and not self._reaches(ordinal):
                raise ValueError(
                    f"GPU {self.number} cannot reach the memory of GPU {number} "
                    "(cuDeviceCanAccessPeer): use GPUs joined by NVLink, or the transport tcp."
                )
            return number
        raise ValueError(
            f"The peer's GPU {identity} is none of the {count.value} that this process sees: start "
            "both on one host with all of its GPUs visible (CUDA_VISIBLE_DEVICES), each told which "
            "one to use."
        )

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context this thread's for a while."""
        self.cuda.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.cuda.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def new_stream(self) -> c_void_p:
        """Return a stream that waits for no other; it stays."""
        stream = c_void_p()
        with self.current():
            self.cuda.call("cuStreamCreate", byref(stream), cuda.NON_BLOCKING)
        return stream

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new zeroed memory that stays for the rest of the process."""
        address = c_uint64()
        with self.current():
            self.cuda.call("cuMemAlloc_v2", byref(address), num_bytes)
        self.zero(address.value, num_bytes)
        return address.value

    def allocate_host(self, num_bytes: int) -> int:
        """Return the address of zeroed host memory that every device reads and writes; it stays."""
        address = c_void_p()
        with self.current():
            self.cuda.call("cuMemHostAlloc", byref(address), num_bytes, cuda.FOR_ALL_DEVICES)
        assert address.value is not None, "cuMemHostAlloc answers success and no address"
        ctypes.memset(address.value, 0, num_bytes)
        return address.value

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device beside whatever runs on it; done on return."""
        buffer = ctypes.create_string_buffer(data, len(data))
        self.copy_in(address, ctypes.addressof(buffer), len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        """Return a copy of device memory, taken beside whatever runs."""
        buffer = ctypes.create_string_buffer(num_bytes)
        self.copy_out(ctypes.addressof(buffer), address, num_bytes)
        return buffer.raw

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> None:
        """Copy from the host; done on return."""
        self._do("cuMemcpyHtoDAsync_v2", address, host_address, num_bytes)

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        """Copy to the host; done on return."""
        self._do("cuMemcpyDtoHAsync_v2", host_address, address, num_bytes)

    def zero(self, address: int, num_bytes: int) -> None:
        """Fill with zeros; done on return."""
        self._do("cuMemsetD8Async", address, 0, num_bytes)

    def is_plain(self, address: int) -> bool:
        """Return whether memory is cuMemAlloc's: devices with peer access reach all of that."""
        value = c_int()
        with self.current():
            name = cuda.IS_LEGACY_IPC_CAPABLE
            self.cuda.call("cuPointerGetAttribute", byref(value), name, address)
        return bool(value.value)

    def settle(self) -> None:
        """Return when everything that was enqueued on the device has ended."""
        with self.current():
            self.cuda.call("cuCtxSynchronize")

    def _do(self, name: str, *arguments) -> None:
        with self._lock, self.current():
            self.cuda.call(name, *arguments, self._stream)
            self.cuda.call("cuStreamSynchronize", self._stream)

    def _reaches(self, ordinal: c_int) -> bool:
        can = c_int()
        self.cuda.call("cuDeviceCanAccessPeer", byref(can), self._ordinal, ordinal)
        return bool(can.value)

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        self.cuda.call("cuDeviceGetAttribute", byref(value), attribute, self._ordinal)
        return value.value


class Landing:
    """Memory of one device, mapped here for some; freed with its last mapping in any process."""

    def __init__(self, device: Device, handle: int, num_bytes: int, users: Sequence[int]):
        """Map what `handle` names, which is given back here; `users` are numbers of devices."""
        call = self._call = device.cuda.call
        self.num_bytes, self._address = num_bytes, 0
        address = c_uint64()
        try:
            call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
            try:
                call("cuMemMap", address.value, num_bytes, 0, handle, 0)
            except BaseException:
                call("cuMemAddressFree", address.value, num_bytes)
                raise
        finally:
            call("cuMemRelease", handle)  # the mapping keeps the memory
        self._address = address.value
        try:
            read_write = Access.READ_WRITE.value
            access = [cuda.AccessDesc(cuda.Location(cuda.ON_DEVICE, n), read_write) for n in users]
            call(
                "cuMemSetAccess",
                self.address,
                num_bytes,
                (cuda.AccessDesc * len(access))(*access),
                len(access),
            )
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> int:
        """Return where it lies, the same for all devices of this process."""
        if not self._address:
            raise ValueError("the landing is closed")
        return self._address

    def close(self) -> None:
        """Unmap; only when no kernel can touch it any more. A second call does nothing."""
        if self._address:
            self._call("cuMemUnmap", self._address, self.num_bytes)
            self._call("cuMemAddressFree", self._address, self.num_bytes)
            self._address = 0


def create_landing(
    device: Device, home: int, num_bytes: int, users: Sequence[int]
) -> tuple[Landing, int]:
    """Return zeroed memory of device `home`, mapped for `users`, and its descriptor.

    `device` is one of the users; the size is rounded up to whole pages. The descriptor is the
    caller's to close.
    """
    location = cuda.Location(cuda.ON_DEVICE, home)
    prop = cuda.AllocationProp(cuda.PINNED, cuda.POSIX_FD, location)
    size = rounded(device, num_bytes)
    handle, fd = c_uint64(), c_int(-1)
    device.cuda.call("cuMemCreate", byref(handle), size, byref(prop), 0)
    try:
        export = "cuMemExportToShareableHandle"
        device.cuda.call(export, byref(fd), handle.value, cuda.POSIX_FD, 0)
    except BaseException:
        device.cuda.call("cuMemRelease", handle.value)
        raise
    landing = Landing(device, handle.value, size, users)
    device.zero(landing.address, size)
    return landing, fd.value


def import_landing(device: Device, fd: int, num_bytes: int) -> Landing:
    """Return another process's memory, mapped for `device`; the descriptor stays the caller's."""
    handle = c_uint64()
    device.cuda.call("cuMemImportFromShareableHandle", byref(handle), fd, cuda.POSIX_FD)
    return Landing(device, handle.value, rounded(device, num_bytes), [device.number])


def rounded(device: Device, num_bytes: int) -> int:
    """Return the next whole number of pages; all GPUs of one kind have the same."""
    size = c_size_t()
    location = cuda.Location(cuda.ON_DEVICE, device.number)
    prop = cuda.AllocationProp(cuda.PINNED, cuda.POSIX_FD, location)
    device.cuda.call("cuMemGetAllocationGranularity", byref(size), byref(prop), cuda.MINIMUM)
    return -(-num_bytes // size.value) * size.value


def _uuid(driver: cuda.Driver, ordinal: c_int) -> str:
    uuid = ctypes.create_string_buffer(cuda.UUID_BYTES)
    driver.call("cuDeviceGetUuid_v2", ctypes.addressof(uuid), ordinal)
    return uuid.raw.hex()
