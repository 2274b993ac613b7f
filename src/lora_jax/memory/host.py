"""Virtual memory of a Linux host: address space from mmap, pages that are parts of one memfd."""

import ctypes
import dataclasses
import errno
import fcntl
import itertools
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from lora_jax.memory.dlpack import CPU, foreign_array
from lora_jax.memory.ledger import AddressLedger
from lora_jax.memory.virtual import (
    AbstractVirtualMemory,
    Access,
    MappingError,
    OutOfPages,
    Usage,
)
from lora_jax.typing import Array

_PROTECTION = {
    Access.NONE: 0,
    Access.READ: mmap.PROT_READ,
    Access.READ_WRITE: mmap.PROT_READ | mmap.PROT_WRITE,
}
_MAP_FIXED = 0x10  # Linux; the mmap module does not name them
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_FILE_NAME = "lora_jax_pages"  # in the list of the process's mappings
_MREMAP_FIXED = 0x02 | 0x01  # MAYMOVE and FIXED
_PUNCH_HOLE = 0x02 | 0x01  # and the file keeps its size, as it must
_ADD_SEALS = 1033  # by number, as other systems' fcntl has no names for them
_SEALS = 0x10 | 0x4 | 0x2 | 0x1  # FUTURE_WRITE (Linux 5.1), GROW, SHRINK, SEAL
_NO_ROOM = (errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *(ctypes.c_int,) * 3,
        ctypes.c_long,
    ]
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return libc


def _new_memfd() -> int:
    return os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _error(what: str, code: int) -> Exception:
    """Return OutOfPages where more memory, files or map entries would help, else MappingError."""
    kind = OutOfPages if code in _NO_ROOM else MappingError
    return kind(f"{what}: {os.strerror(code)}")


def _call(what: str, action: Callable[[], int]) -> int:
    """Return what a system call gives; its error is this module's."""
    try:
        return action()
    except OSError as error:
        raise _error(what, error.errno or 0) from error


@dataclasses.dataclass
class _File:
    """A memfd by its descriptor. Offsets are given once, also after their page is gone."""

    fd: int
    pages: int = 0
    end: int = 0
    window: int | None = None  # address of all of a sealed file's bytes, writable


@dataclasses.dataclass(frozen=True)
class _Place:
    """Location of a page's bytes."""

    file: _File
    offset: int


class HostMemory(AbstractVirtualMemory):
    """Pages are parts of one memfd, behind one descriptor; holes are zeros, or forbidden.

    Readable holes cost nothing and let a program that reads a whole tensor live; forbidden ones
    end the process at the first touch, which is what tests want. The file is there while there are
    pages; a page that goes leaves a hole in it, which takes no memory and no other page's bytes
    ever. An exported descriptor stands at its page's offset, and whoever has it can read the file's
    other pages too: export to processes that may.

    The first export seals the file: from then on the kernel refuses every write and every new
    writable map of it, also by a descriptor that the importer opens again for writing by way of
    /proc. The exporter keeps one mapping from before, and copies parts of it to where its pages
    are mapped. A sealed file takes no more pages and has no holes: pages created later lie in
    another one, and its memory returns with its last page.
    """

    def __init__(self, holes: Literal["zero", "none"] = "zero", *, device: int = 0):
        """`device` is the number of jax's CPU device that arrays are of.

        Raises NotImplementedError where there is no memfd; ValueError for another `holes`.
        """
        if sys.platform != "linux":
            raise NotImplementedError(f"host memory needs Linux (memfd), not {sys.platform}")
        if holes not in ("zero", "none"):
            raise ValueError(f"holes {holes!r} is neither 'zero' nor 'none'")
        self._libc, self._device = _libc(), device
        self._hole = Access.READ if holes == "zero" else Access.NONE
        self._ledger = AddressLedger(mmap.PAGESIZE)
        self._lock = threading.Lock()
        self._own: _File | None = None  # takes new pages
        self._sealed: list[_File] = []  # the exported ones
        self._imported: dict[tuple[int, int], _File] = {}  # by device and inode
        self._places: dict[int, _Place] = {}  # by handle
        self._handles = itertools.count(1)

    @property
    def granularity(self) -> int:
        return mmap.PAGESIZE

    def reserve(self, num_bytes: int) -> int:
        self._ledger.check_size("reserve", num_bytes)
        address = self._mmap_hole(None, num_bytes, f"reserve {num_bytes} bytes")
        with self._lock:
            self._ledger.record_reservation(address, num_bytes)
        return address

    def release(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._ledger.check_release(address, num_bytes)
            if self._libc.munmap(address, num_bytes):
                raise _error(f"release {address:#x} + {num_bytes}", ctypes.get_errno())
            self._ledger.forget_reservation(address)

    def create_page(self, num_bytes: int) -> int:
        self._ledger.check_size("create_page", num_bytes)
        with self._lock:
            file = self._own or _File(_call("create_page", _new_memfd))
            try:
                # Taken now, or a later write would be killed where there is no memory left.
                os.posix_fallocate(file.fd, file.end, num_bytes)
            except OSError as error:
                if not file.pages:
                    os.close(file.fd)
                raise _error(f"create_page of {num_bytes} bytes", error.errno or 0) from error
            self._own, offset = file, file.end
            file.end += num_bytes
            return self._add(_Place(file, offset), num_bytes, imported=False)

    def destroy_page(self, handle: int) -> None:
        with self._lock:
            self._ledger.check_unused(handle)
            place, page = self._places[handle], self._ledger.pages[handle]
            last = place.file.pages == 1
            # A file that is closed takes all its bytes along; a sealed one keeps them until then.
            if not (page.imported or last or place.file.window):
                self._punch_hole(place, page.num_bytes)
            self._ledger.forget_page(handle)
            del self._places[handle]
            place.file.pages -= 1
            if last:
                self._forget_file(place.file)

    def map_run(self, address: int, handles: Sequence[int], num_bytes: int) -> None:
        with self._lock:
            access = self._ledger.check_map(address, handles, num_bytes)
            places = self._ledger.places(address, handles)
            for start, size, handle in places:
                if code := self._mmap_page(start, size, access, self._places[handle]):
                    if start > address:
                        self._mmap_hole(address, start - address, "undo map")
                    raise _error(f"map page {handle} at {start:#x} + {size}", code)
            for start, _, handle in places:
                self._ledger.record_mapping(start, handle, access)

    def unmap(self, address: int, num_bytes: int) -> None:
        with self._lock:
            mappings = self._ledger.find_mappings("unmap", address, num_bytes)
            self._mmap_hole(address, num_bytes, f"unmap {address:#x} + {num_bytes}")
            for mapping in mappings:
                self._ledger.forget_mapping(mapping.address)

    def protect(self, address: int, num_bytes: int, access: Access) -> None:
        with self._lock:
            mappings = self._ledger.check_protect(address, num_bytes, access)
            if self._libc.mprotect(address, num_bytes, _PROTECTION[access]):
                raise _error(f"protect {address:#x} + {num_bytes}", ctypes.get_errno())
            for mapping in mappings:
                self._ledger.record_access(mapping.address, access)

    def export_fd(self, handle: int) -> int:
        with self._lock:
            self._ledger.find_page(handle)
            place = self._places[handle]
            path = f"/proc/self/fd/{place.file.fd}"
            fd = _call(f"export page {handle}", lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            try:
                if place.file is self._own:
                    self._seal(place.file)
            except BaseException:
                os.close(fd)
                raise
            os.lseek(fd, place.offset, os.SEEK_SET)
            return fd

    def _seal(self, file: _File) -> None:
        """Let no one write the file any more but by mappings that are copies of the window."""
        shared = mmap.MAP_SHARED | _MAP_NORESERVE
        protection = _PROTECTION[Access.READ_WRITE]
        window = self._libc.mmap(None, file.end, protection, shared, file.fd, 0)
        if window is None or window == _FAILED:
            raise _error(f"export: map {file.end} bytes", ctypes.get_errno())
        try:
            _call(
                "export: seal the pages (Linux 5.1)",
                lambda: fcntl.fcntl(file.fd, _ADD_SEALS, _SEALS),
            )
        except BaseException:
            self._libc.munmap(window, file.end)
            raise
        file.window, self._own = window, None
        self._sealed.append(file)

    def import_fd(self, fd: int, num_bytes: int) -> int:
        self._ledger.check_size("import_fd", num_bytes)
        status = os.fstat(fd)
        offset = _call("import_fd", lambda: os.lseek(fd, 0, os.SEEK_CUR))
        if offset % self.granularity or offset + num_bytes > status.st_size:
            raise MappingError(
                f"import_fd: no page of {num_bytes} bytes is at {offset} of {status.st_size}"
            )
        with self._lock:
            key = status.st_dev, status.st_ino
            file = self._imported.get(key)
            if file is None:
                duplicate = _call("import_fd", lambda: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0))
                file = self._imported[key] = _File(duplicate)
            return self._add(_Place(file, offset), num_bytes, imported=True)

    def write(self, address: int, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        with self._lock:
            self._ledger.check_access("write", address, data.nbytes, Access.READ_WRITE)
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def clear(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._ledger.check_access("clear", address, num_bytes, Access.READ_WRITE)
        ctypes.memset(address, 0, num_bytes)

    def read(self, address: int, num_bytes: int) -> bytes:
        with self._lock:
            readable = (Access.READ, Access.READ_WRITE)
            self._ledger.check_access("read", address, num_bytes, *readable)
        return ctypes.string_at(address, num_bytes)

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            self._ledger.check_reserved("array", address, num_bytes)
        return foreign_array(address, shape, dtype, (CPU, self._device))

    def usage(self) -> Usage:
        """Created: blocks of our files. Mapped: files' lines in the process's memory map."""
        with self._lock:
            files = [*self._sealed, *([self._own] if self._own else [])]
            created = sum(os.fstat(file.fd).st_blocks * 512 for file in files)
            mapped = 0
            with open("/proc/self/maps") as lines:
                for line in lines:
                    if _FILE_NAME in line:
                        start, end = (int(number, 16) for number in line.split()[0].split("-"))
                        mapped += end - start if self._ledger.is_reserved(start) else 0
            return Usage(created, mapped)

    def _add(self, place: _Place, num_bytes: int, imported: bool) -> int:
        handle = next(self._handles)
        self._places[handle] = place
        place.file.pages += 1
        self._ledger.record_page(handle, num_bytes, imported)
        return handle

    def _forget_file(self, file: _File) -> None:
        if file is self._own:
            self._own = None
        elif file.window is not None:
            self._libc.munmap(file.window, file.end)
            self._sealed = [f for f in self._sealed if f is not file]
        else:
            self._imported = {key: f for key, f in self._imported.items() if f is not file}
        os.close(file.fd)

    def _punch_hole(self, place: _Place, num_bytes: int) -> None:
        """Give the system the memory of a part of the file."""
        if self._libc.fallocate(place.file.fd, _PUNCH_HOLE, place.offset, num_bytes):
            raise _error(f"free {num_bytes} bytes at {place.offset}", ctypes.get_errno())

    def _mmap_page(self, address: int, num_bytes: int, access: Access, page: _Place) -> int:
        """Map a part of a file over reserved addresses; return 0 or the error's number."""
        protection = _PROTECTION[access]
        if page.file.window is None:
            flags = mmap.MAP_SHARED | _MAP_FIXED
            where = page.file.fd, page.offset
            mapped = self._libc.mmap(address, num_bytes, protection, flags, *where)
            return 0 if mapped == address else ctypes.get_errno()
        source = page.file.window + page.offset
        # An old size of 0 leaves the shared mapping where it is and makes another one of it.
        mapped = self._libc.mremap(source, 0, num_bytes, _MREMAP_FIXED, address)
        if mapped == address and not self._libc.mprotect(address, num_bytes, protection):
            return 0
        return ctypes.get_errno()

    def _mmap_hole(self, address: int | None, num_bytes: int, what: str) -> int:
        """Return the address of a range without pages; at `address` it replaces what is there."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        flags |= 0 if address is None else _MAP_FIXED
        mapped = self._libc.mmap(address, num_bytes, _PROTECTION[self._hole], flags, -1, 0)
        if mapped is None or mapped == _FAILED:
            raise _error(what, ctypes.get_errno())
        return mapped
