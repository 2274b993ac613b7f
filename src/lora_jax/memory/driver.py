"""Virtual memory of an accelerator: the books, the lock and the undo around a driver's calls."""

import abc
import ctypes
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lora_jax.memory.ledger import AddressLedger
from lora_jax.memory.virtual import AbstractVirtualMemory, Access, MappingError, Usage


def load_library(path: str, signatures: Mapping[str, tuple[type, ...]], what: str) -> ctypes.CDLL:
    """Return a driver's library whose functions of these arguments answer an int.

    Raises:
        NotImplementedError: there is no such library, or one without these functions; `what` says
            whose it is.
    """
    try:
        library = ctypes.CDLL(path)
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = ctypes.c_int, arguments
    except (OSError, AttributeError) as error:
        raise NotImplementedError(f"no {what} with virtual memory: {error}") from error
    return library


class AbstractDriver(abc.ABC):
    """The plain calls of one device; arguments are checked already, sizes are in bytes.

    A call that fails raises OutOfPages where memory ran out, NotImplementedError where the driver
    has no such thing, else MappingError; then it has done nothing.
    """

    @property
    @abc.abstractmethod
    def granularity(self) -> int:
        """Return the smallest size of a page."""

    @abc.abstractmethod
    def reserve(self, num_bytes: int) -> int:
        """Return the address of a new range."""

    @abc.abstractmethod
    def release(self, address: int, num_bytes: int) -> None:
        """Give a range back."""

    @abc.abstractmethod
    def create(self, num_bytes: int) -> int:
        """Return the driver's handle of new physical memory."""

    @abc.abstractmethod
    def destroy(self, handle: int) -> None:
        """Give physical memory back."""

    @abc.abstractmethod
    def map(self, address: int, handle: int, num_bytes: int) -> None:
        """Put physical memory at an address, whose access is not set yet."""

    @abc.abstractmethod
    def unmap(self, address: int, num_bytes: int) -> None:
        """Take one mapping away."""

    @abc.abstractmethod
    def grant(self, address: int, num_bytes: int, access: Access) -> None:
        """Set the access of whole mappings that lie one behind another."""

    @abc.abstractmethod
    def export_fd(self, handle: int) -> int:
        """Return a new file descriptor of physical memory."""

    @abc.abstractmethod
    def import_fd(self, fd: int, num_bytes: int) -> int:
        """Return the driver's handle of another process's memory."""

    @abc.abstractmethod
    def copy_in(self, address: int, host_address: int, num_bytes: int) -> None:
        """Copy from the host; on return the bytes are there."""

    def begin_copy_in(self, address: int, host_address: int, num_bytes: int, owner: object) -> None:
        """Copy from the host some time before `finish_copies` returns; `owner` is kept until then.

        What fails may raise there.
        """
        del owner
        self.copy_in(address, host_address, num_bytes)

    def pin(self, array: np.ndarray) -> None:  # noqa: B027  where it makes no difference
        """Make copies out of the memory under an array fast; it is left as it is while it lives."""

    def copies_done(self) -> bool:
        """True if finish_copies would return at once."""
        return True

    def finish_copies(self) -> None:  # noqa: B027  where begin_copy_in has done everything
        """Return when all bytes are there; raise the first error."""

    @abc.abstractmethod
    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        """Copy to the host."""

    @abc.abstractmethod
    def copy_within(self, address: int, source: int, num_bytes: int) -> None:
        """Copy from another address of the device; on return the bytes are there."""

    @abc.abstractmethod
    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a jax.Array over device addresses."""

    @abc.abstractmethod
    def device_used(self) -> int:
        """Return the bytes in use on the whole device, by everybody."""

    def clear(self, address: int, num_bytes: int) -> None:
        """Set bytes to zeros; done on return, and no program waits for it."""
        raise NotImplementedError(f"{type(self).__name__} clears no memory")

    def begin_clear(self, address: int, num_bytes: int) -> None:
        """Set bytes to zeros some time before `finish_clears` returns."""
        self.clear(address, num_bytes)

    def finish_clears(self) -> None:  # noqa: B027  where begin_clear has done everything
        """Return when all bytes are zeros; raise what failed."""

    def device_free(self) -> int | None:
        """Return the bytes of the device that nobody uses, or None where nobody knows."""
        return None


class DriverMemory(AbstractVirtualMemory):
    """The memory of the device that `driver` drives."""

    def __init__(self, driver: AbstractDriver):
        self._driver = driver
        self._ledger = AddressLedger(driver.granularity)
        self._lock = threading.Lock()
        self._handles: dict[int, int] = {}  # ours -> the driver's, which may repeat
        self._numbers = itertools.count(1)
        self._clears = self._clears_ended = 0  # how many were begun, and have surely ended

    @property
    def granularity(self) -> int:
        return self._ledger.granularity

    def reserve(self, num_bytes: int) -> int:
        self._ledger.check_size("reserve", num_bytes)
        with self._lock:
            address = self._driver.reserve(num_bytes)
            self._ledger.record_reservation(address, num_bytes)
            return address

    def release(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._ledger.check_release(address, num_bytes)
            self._driver.release(address, num_bytes)
            self._ledger.forget_reservation(address)

    def create_page(self, num_bytes: int) -> int:
        self._ledger.check_size("create_page", num_bytes)
        with self._lock:
            return self._add(self._driver.create(num_bytes), num_bytes, imported=False)

    def destroy_page(self, handle: int) -> None:
        with self._lock:
            self._ledger.check_unused(handle)
            self._driver.destroy(self._handles[handle])
            del self._handles[handle]
            self._ledger.forget_page(handle)

    def map_run(self, address: int, handles: Sequence[int], num_bytes: int) -> None:
        with self._lock:
            access = self._ledger.check_map(address, handles, num_bytes)
            places = self._ledger.places(address, handles)
            done: list[tuple[int, int]] = []
            try:
                for start, size, handle in places:
                    self._driver.map(start, self._handles[handle], size)
                    done.append((start, size))
                # One call for the run: it costs more than the mapping itself.
                self._driver.grant(address, num_bytes, access)
            except BaseException:
                for start, size in done:
                    self._driver.unmap(start, size)
                raise
            for start, _, handle in places:
                self._ledger.record_mapping(start, handle, access)

    def unmap(self, address: int, num_bytes: int) -> None:
        self.finish_clears()  # which would write where nothing is mapped
        with self._lock:
            for mapping in self._ledger.find_mappings("unmap", address, num_bytes):
                self._driver.unmap(mapping.address, mapping.num_bytes)
                self._ledger.forget_mapping(mapping.address)

    def protect(self, address: int, num_bytes: int, access: Access) -> None:
        with self._lock:
            mappings = self._ledger.check_protect(address, num_bytes, access)
            self._driver.grant(address, num_bytes, access)
            for mapping in mappings:
                self._ledger.record_access(mapping.address, access)

    def export_fd(self, handle: int) -> int:
        with self._lock:
            self._ledger.find_page(handle)
            return self._driver.export_fd(self._handles[handle])

    def import_fd(self, fd: int, num_bytes: int) -> int:
        self._ledger.check_size("import_fd", num_bytes)
        with self._lock:
            return self._add(self._driver.import_fd(fd, num_bytes), num_bytes, imported=True)

    def write(self, address: int, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        with self._lock:
            self._ledger.check_access("write", address, data.nbytes, Access.READ_WRITE)
        self.finish_clears()
        self._driver.copy_in(address, data.ctypes.data, data.nbytes)

    def begin_write(self, address: int, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        with self._lock:
            self._ledger.check_access("write", address, data.nbytes, Access.READ_WRITE)
        self.finish_clears()
        self._driver.begin_copy_in(address, data.ctypes.data, data.nbytes, data)

    def begin_write_into(self, array: Any, offset: int, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        if offset < 0 or offset + data.nbytes > array.nbytes:
            raise MappingError(
                f"Bytes {offset} to {offset + data.nbytes} are not in an array of {array.nbytes}."
            )
        address = array.unsafe_buffer_pointer() + offset
        self._driver.begin_copy_in(address, data.ctypes.data, data.nbytes, data)

    def pin(self, data: np.ndarray) -> None:
        self._driver.pin(data)

    def writes_done(self) -> bool:
        return self._driver.copies_done()

    def finish_writes(self) -> None:
        self._driver.finish_copies()

    def write_array(self, address: int, array: Any) -> None:
        with self._lock:
            self._ledger.check_access("write", address, array.nbytes, Access.READ_WRITE)
        self.finish_clears()
        source = array.block_until_ready().unsafe_buffer_pointer()
        self._driver.copy_within(address, source, array.nbytes)

    def clear(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._ledger.check_access("clear", address, num_bytes, Access.READ_WRITE)
        self._driver.clear(address, num_bytes)

    def begin_clear(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._ledger.check_access("clear", address, num_bytes, Access.READ_WRITE)
            self._driver.begin_clear(address, num_bytes)
            self._clears += 1

    def finish_clears(self) -> None:
        if (begun := self._clears) > self._clears_ended:
            self._driver.finish_clears()
            self._clears_ended = max(self._clears_ended, begun)

    def read(self, address: int, num_bytes: int) -> bytes:
        with self._lock:
            readable = (Access.READ, Access.READ_WRITE)
            self._ledger.check_access("read", address, num_bytes, *readable)
        self.finish_clears()
        buffer = ctypes.create_string_buffer(num_bytes)
        self._driver.copy_out(ctypes.addressof(buffer), address, num_bytes)
        return buffer.raw

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            self._ledger.check_reserved("array", address, num_bytes)
        return self._driver.array(address, shape, np.dtype(dtype))

    def usage(self) -> Usage:
        """Created and mapped from the ledger: drivers only count the whole device."""
        with self._lock:
            driver, ledger = self._driver, self._ledger
            of_device = driver.device_used(), driver.device_free()
            return Usage(ledger.created_bytes, ledger.mapped_bytes, *of_device)

    def _add(self, driver_handle: int, num_bytes: int, imported: bool) -> int:
        handle = next(self._numbers)
        self._handles[handle] = driver_handle
        self._ledger.record_page(handle, num_bytes, imported)
        return handle
