"""The contract of virtual memory: address ranges and physical pages, kept apart. No jax here.

A range is reserved once and keeps its address; pages are created, mapped into it, unmapped and
destroyed while programs that were compiled for the range stay as they are (ExpertWeave, section
4.2). Nothing here waits for a device: unmap only what no step in flight can read.
"""

import abc
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np


class OutOfPages(MemoryError):
    """No physical memory for a page: the budget, the device or the OS is exhausted."""


class MappingError(ValueError):
    """An address, a size or a handle that does not fit what is reserved, created or mapped."""


class Access(enum.Enum):
    """Access rights of a program to a mapped range."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes of one memory, counted by the OS where it counts them, else by the backend's ledger."""

    created: int  # physical pages of this memory that exist, imported ones not counted
    mapped: int  # address space that has a page behind it
    device_used: int | None = None  # of the whole device, by its driver; None on a host
    device_free: int | None = None  # what nobody uses, where the driver says so


class AbstractVirtualMemory(abc.ABC):
    """Reserve, create, map, protect and share; sizes in bytes, addresses as integers.

    All methods may be called from any thread. Those that fail leave everything as it was.
    """

    @property
    @abc.abstractmethod
    def granularity(self) -> int:
        """Return the bytes of which every size and every mapped address is a multiple."""

    @abc.abstractmethod
    def reserve(self, num_bytes: int) -> int:
        """Return the address of a new range without pages; OutOfPages where there is no room."""

    @abc.abstractmethod
    def release(self, address: int, num_bytes: int) -> None:
        """Give a reserved range back, whole; MappingError while anything is mapped in it."""

    @abc.abstractmethod
    def create_page(self, num_bytes: int) -> int:
        """Return the handle of new physical memory, filled at once; OutOfPages if there is none."""

    @abc.abstractmethod
    def destroy_page(self, handle: int) -> None:
        """Give a page back, own or imported; MappingError while it is mapped anywhere."""

    @abc.abstractmethod
    def map_run(self, address: int, handles: Sequence[int], num_bytes: int) -> None:
        """Put pages of any sizes behind one another at `address`: all of them or none.

        Own pages become readable and writable, imported ones as the exporter allows. One page may
        be mapped at several addresses.

        Raises:
            MappingError: misaligned, outside a reservation, mapped already, `num_bytes` is not
                what the pages have together, or the system refuses.
            OutOfPages: the system has no room for its own tables.
        """

    def map(self, address: int, handle: int, num_bytes: int) -> None:
        """Put one page at `address`; as `map_run`."""
        self.map_run(address, [handle], num_bytes)

    @abc.abstractmethod
    def unmap(self, address: int, num_bytes: int) -> None:
        """Take whole mappings away from the range, which must be mapped without a gap.

        Where the system refuses one of them, those before it are unmapped.
        """

    @abc.abstractmethod
    def protect(self, address: int, num_bytes: int, access: Access) -> None:
        """Set what may be done with whole mappings that fill the range.

        Raises:
            MappingError: not mapped, or READ_WRITE on an imported page.
            NotImplementedError: the system has no such access.
        """

    @abc.abstractmethod
    def export_fd(self, handle: int) -> int:
        """Return a new file descriptor, the caller's to close, by which others may read a page."""

    @abc.abstractmethod
    def import_fd(self, fd: int, num_bytes: int) -> int:
        """Return the handle of another process's page; `fd` stays the caller's to close."""

    @abc.abstractmethod
    def write(self, address: int, data: np.ndarray) -> None:
        """Copy the array's bytes, in C order, to mapped and writable addresses; done on return."""

    @abc.abstractmethod
    def clear(self, address: int, num_bytes: int) -> None:
        """Set mapped and writable addresses to zeros; done on return.

        Raises:
            MappingError: not mapped, or not writable.
            NotImplementedError: the device has no such call.
        """

    def begin_clear(self, address: int, num_bytes: int) -> None:
        """Clear as `clear` does, but zeros may arrive as late as `finish_clears` returns.

        Other calls on these addresses take effect after it. No program may be sent to the device
        before that reads or writes them.
        """
        self.clear(address, num_bytes)

    def finish_clears(self) -> None:  # noqa: B027  where begin_clear has written everything
        """Return when all that was begun is zeros; raises what failed."""

    def begin_write(self, address: int, data: np.ndarray) -> None:
        """Copy as `write` does, but the bytes may arrive as late as `finish_writes` returns.

        Until then nobody changes `data`, and the addresses stay mapped.
        """
        self.write(address, data)

    def begin_write_into(self, array: Any, offset: int, data: np.ndarray) -> None:
        """As `begin_write`, from byte `offset` of any jax.Array of this device.

        No program may write the array, or read the place, before the bytes are there.

        Raises:
            MappingError: the data ends behind the array.
        """
        raise NotImplementedError(f"{type(self).__name__} writes into no array of others")

    def pin(self, data: np.ndarray) -> None:  # noqa: B027  where it makes no difference
        """Make writes of this array, or of views of its memory, fast. Nobody changes it any more.

        It stays pinned while it lives.
        """

    def writes_done(self) -> bool:
        """True if `finish_writes` would return, or raise, at once."""
        return True

    def finish_writes(self) -> None:  # noqa: B027  where begin_write has written everything
        """Return when all that was begun is there; raises the first error of what failed."""

    def write_array(self, address: int, array: Any) -> None:
        """Copy a jax.Array of this memory's device, in C order, as `write`; the host may help."""
        self.write(address, np.asarray(array))

    @abc.abstractmethod
    def read(self, address: int, num_bytes: int) -> bytes:
        """Return a copy of the bytes at mapped addresses."""

    @abc.abstractmethod
    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a jax.Array over the addresses, without a copy; it does not own them.

        What is mapped or written later shows in it. The reservation must outlive every use, and
        no program may read a part without pages, unless the memory says that holes are zeros.

        Raises:
            MappingError: the array is not inside one reservation.
            NotImplementedError: jax has no such device.
        """

    @abc.abstractmethod
    def usage(self) -> Usage:
        """Return the bytes that exist and are mapped now."""
