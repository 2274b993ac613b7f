"""The host's memory: the contract over the kernel, holes, faults, sharing."""

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from support.contracts.memory_contract import SharingContract, VirtualMemoryContract
from support.processes.process_facts import open_files

from lora_jax.memory import host
from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import Access, MappingError, OutOfPages


@pytest.fixture(params=["zero", "none"])
def memory(request):
    return HostMemory(request.param)


class TestMemory(VirtualMemoryContract):
    """The contract, with both kinds of holes."""


class TestSharing(SharingContract):
    """Export and import in one process."""


def test_readable_holes_are_zeros_also_after_an_unmap():
    memory, page = HostMemory(), mmap.PAGESIZE
    address, handle = memory.reserve(4 * page), memory.create_page(page)
    array = memory.array(address, (4, page), np.dtype(np.uint8))
    memory.map(address + page, handle, page)
    memory.write(address + page, np.full(page, 7, np.uint8))
    np.testing.assert_array_equal(np.asarray(array).sum(axis=1), [0, 7 * page, 0, 0])
    memory.unmap(address + page, page)
    assert int(np.asarray(array).sum()) == 0
    array.delete()
    memory.destroy_page(handle)
    memory.release(address, 4 * page)


FAULTS = """
import ctypes, mmap, os, numpy as np
from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import Access
page = mmap.PAGESIZE
def signal_of(action):
    child = os.fork()
    if not child:
        action()
        os._exit(0)
    return os.waitpid(child, 0)[1] & 127
def touch(at): return lambda: ctypes.string_at(at, 1)
def poke(at): return lambda: ctypes.memset(at, 1, 1)
none, zero = HostMemory("none"), HostMemory("zero")
a, b = none.reserve(3 * page), zero.reserve(3 * page)
for memory, address in ((none, a), (zero, b)):
    memory.map(address, memory.create_page(page), page)
own = [signal_of(f(at)) for at in (a, b) for f in (touch, poke)]
holes = [signal_of(f(at + page)) for at in (a, b) for f in (touch, poke)]
none.protect(a, page, Access.READ)
read_only = [signal_of(f(a)) for f in (touch, poke)]
none.protect(a, page, Access.NONE)
nothing = [signal_of(f(a)) for f in (touch, poke)]
zero.unmap(b, page)
after = [signal_of(f(b)) for f in (touch, poke)]
print(own, holes, read_only, nothing, after, sep=";")
"""


def test_the_kernel_enforces_holes_and_access():
    """Signal 11 where there is no page or no right; each access in a child of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    own, holes, read_only, nothing, after = map(eval, done.stdout.strip().split(";"))
    assert own == [0, 0, 0, 0]
    assert holes == [11, 11, 0, 11]  # forbidden: neither; zeros: reading only
    assert read_only == [0, 11]
    assert nothing == [11, 11]
    assert after == [0, 11]


def test_the_kernels_own_counts_follow():
    """Usage is read from the page files and the process's map, not from our books."""
    memory, page = HostMemory(), mmap.PAGESIZE
    address = memory.reserve(8 * page)
    handles = [memory.create_page(2 * page) for _ in range(2)]
    memory.map_run(address, handles, 4 * page)
    memory.map(address + 6 * page, handles[0], 2 * page)
    assert (memory.usage().created, memory.usage().mapped) == (4 * page, 6 * page)
    assert memory.usage().device_used is None
    memory.unmap(address, 4 * page)
    assert (memory.usage().created, memory.usage().mapped) == (4 * page, 2 * page)
    memory.unmap(address + 6 * page, 2 * page)
    for handle in handles:
        memory.destroy_page(handle)
    assert (memory.usage().created, memory.usage().mapped) == (0, 0)
    memory.release(address, 8 * page)


def test_a_large_reservation_costs_no_memory():
    memory = HostMemory()
    before = resident_bytes()
    address = memory.reserve(1 << 36)
    array = memory.array(address, (1 << 6, 1 << 14, 1 << 14), np.dtype(np.float32))
    assert array.nbytes == 1 << 36
    assert resident_bytes() - before < 64 << 20
    array.delete()
    memory.release(address, 1 << 36)


def resident_bytes() -> int:
    with open("/proc/self/statm") as line:
        return int(line.read().split()[1]) * mmap.PAGESIZE


def test_an_exported_page_cannot_be_mapped_for_writing():
    """The kernel refuses it by the descriptor, whatever the importer's program is."""
    memory, page = HostMemory(), mmap.PAGESIZE
    handle = memory.create_page(page)
    fd = memory.export_fd(handle)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)
    memory.destroy_page(handle)


REOPENER = """
import errno, fcntl, mmap, os, sys
fd, page = int(sys.argv[1]), mmap.PAGESIZE
again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
attempts = {
    "write": lambda: os.pwrite(again, b"x", 0),
    "map": lambda: mmap.mmap(again, page, mmap.MAP_SHARED, mmap.PROT_WRITE),
    "shrink": lambda: os.ftruncate(again, 0),
    "grow": lambda: os.ftruncate(again, 1 << 20),
    "allocate": lambda: os.posix_fallocate(again, 0, 1 << 20),
    "unseal": lambda: fcntl.fcntl(again, fcntl.F_ADD_SEALS, 0),
}
for name, attempt in attempts.items():
    try:
        attempt()
        print(name, "allowed")
    except OSError as error:
        print(name, errno.errorcode[error.errno])
seen = mmap.mmap(again, page, mmap.MAP_SHARED, mmap.PROT_READ)
print(seen[0])
"""


def test_an_importer_that_opens_its_descriptor_again_is_refused_every_write():
    """By way of /proc the memfd opens for writing; the kernel's seals refuse what follows."""
    memory, page = HostMemory(), mmap.PAGESIZE
    address, handle = memory.reserve(page), memory.create_page(page)
    memory.map(address, handle, page)
    memory.write(address, np.full(page, 7, np.uint8))
    fd = memory.export_fd(handle)
    command = [sys.executable, "-c", REOPENER, str(fd)]
    done = subprocess.run(command, pass_fds=[fd], capture_output=True, text=True, timeout=120)
    names = ("write", "map", "shrink", "grow", "allocate", "unseal")
    assert done.stdout.splitlines() == [*(f"{name} EPERM" for name in names), "7"], done.stderr
    os.close(fd)
    memory.unmap(address, page)
    memory.destroy_page(handle)
    memory.release(address, page)


def test_the_owner_writes_and_maps_exported_pages_as_before():
    """At new addresses too, with each access; later pages lie in another file."""
    files, page = open_files(), mmap.PAGESIZE
    memory, importer = HostMemory(), HostMemory()
    address, there = memory.reserve(4 * page), importer.reserve(page)
    pages = [memory.create_page(page) for _ in range(2)]
    memory.map(address, pages[1], page)
    fd = memory.export_fd(pages[1])
    shown = importer.import_fd(fd, page)
    os.close(fd)
    importer.map(there, shown, page)
    memory.write(address, np.full(page, 5, np.uint8))
    assert importer.read(there, page) == bytes([5]) * page
    memory.unmap(address, page)
    memory.map(address + 2 * page, pages[1], page)
    memory.write(address + 2 * page, np.full(page, 6, np.uint8))
    assert importer.read(there, page) == bytes([6]) * page
    later = memory.create_page(page)
    memory.map_run(address, [later, pages[0]], 2 * page)
    memory.write(address, np.full(2 * page, 8, np.uint8))
    assert importer.read(there, page) == bytes([6]) * page
    memory.unmap(address, 3 * page)
    importer.unmap(there, page)
    importer.destroy_page(shown)
    for handle in (*pages, later):
        memory.destroy_page(handle)
    assert memory.usage().created == 0
    assert open_files() <= files
    memory.release(address, 4 * page)
    importer.release(there, page)


def test_an_import_of_another_size_is_refused():
    memory, page = HostMemory(), mmap.PAGESIZE
    handle = memory.create_page(page)
    fd = memory.export_fd(handle)
    with pytest.raises(MappingError, match=f"no page of {2 * page} bytes is at 0 of {page}"):
        memory.import_fd(fd, 2 * page)
    os.lseek(fd, 1, os.SEEK_SET)
    with pytest.raises(MappingError, match=f"is at 1 of {page}"):
        memory.import_fd(fd, page)
    os.close(fd)
    memory.destroy_page(handle)
    for end in os.pipe():
        with pytest.raises(MappingError, match="import_fd: Illegal seek"):
            memory.import_fd(end, page)
        os.close(end)


def test_pages_share_a_descriptor_on_both_sides_and_exported_memory_returns_with_the_last():
    """A page's part of the file is never another page's."""
    files, page = open_files(), mmap.PAGESIZE
    memory, importer = HostMemory(), HostMemory()
    address, there = memory.reserve(50 * page), importer.reserve(50 * page)
    pages = [memory.create_page(page) for _ in range(50)]
    memory.map_run(address, pages, 50 * page)
    memory.write(address, np.repeat(np.arange(50, dtype=np.uint8), page))
    fds = [memory.export_fd(handle) for handle in pages[10:20]]
    imported = [importer.import_fd(fd, page) for fd in fds]
    for fd in fds:
        os.close(fd)
    assert len(open_files() - files) == 2
    importer.map_run(there, imported, 10 * page)
    assert importer.read(there, 10 * page) == memory.read(address + 10 * page, 10 * page)
    memory.unmap(address, 49 * page)
    for handle in pages[:49]:
        memory.destroy_page(handle)
    assert memory.usage().created == 50 * page
    fresh = memory.create_page(page)
    memory.map(address, fresh, page)
    memory.write(address, np.full(page, 99, np.uint8))
    want = np.repeat(np.arange(10, 20, dtype=np.uint8), page).tobytes()
    assert importer.read(there, 10 * page) == want
    assert memory.read(address + 49 * page, page) == bytes([49]) * page
    memory.unmap(address, page)
    memory.unmap(address + 49 * page, page)
    importer.unmap(there, 10 * page)
    for handle in (fresh, pages[49]):
        memory.destroy_page(handle)
    for handle in imported:
        importer.destroy_page(handle)
    assert memory.usage().created == 0
    assert open_files() <= files
    memory.release(address, 50 * page)
    importer.release(there, 50 * page)


def test_memory_that_nobody_was_shown_returns_page_by_page():
    memory, page = HostMemory(), mmap.PAGESIZE
    pages = [memory.create_page(page) for _ in range(5)]
    for gone, handle in enumerate(pages, 1):
        memory.destroy_page(handle)
        assert memory.usage().created == (5 - gone) * page


DESCRIPTORS = """
import os, resource
from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import OutOfPages
memory, other = HostMemory(), HostMemory()
pages = [memory.create_page(memory.granularity)]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
pages += [memory.create_page(memory.granularity) for _ in range(1999)]
for call in (lambda: memory.export_fd(pages[0]), lambda: other.create_page(other.granularity)):
    try:
        call()
    except OutOfPages as error:
        print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(memory.usage().created == 2000 * memory.granularity)
"""


def test_thousands_of_pages_need_one_descriptor_and_an_export_one_more():
    done = subprocess.run(
        [sys.executable, "-c", DESCRIPTORS], capture_output=True, text=True, timeout=120
    )
    said = done.stdout.splitlines()
    refused = ["export page 1: Too many open files", "create_page: Too many open files"]
    assert said == [*refused, "True"], done.stderr[-2000:]


def test_a_hole_that_the_kernel_refuses_leaves_the_page():
    memory, page = HostMemory(), mmap.PAGESIZE
    handles = [memory.create_page(page) for _ in range(2)]
    own = memory._own
    assert own is not None
    fd, own.fd = own.fd, -1
    with pytest.raises(MappingError, match=f"free {page} bytes at {page}: Bad file descriptor"):
        memory.destroy_page(handles[1])
    own.fd = fd
    assert memory.usage().created == 2 * page
    for handle in handles:
        memory.destroy_page(handle)


def test_memory_that_the_system_lacks_is_out_of_pages(monkeypatch):
    memory, page = HostMemory(), mmap.PAGESIZE
    files = open_files()

    def full(fd, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host.os, "posix_fallocate", full)
    with pytest.raises(OutOfPages, match=f"{page} bytes: No space left"):
        memory.create_page(page)
    assert open_files() <= files
    with pytest.raises(OutOfPages, match="reserve"):
        memory.reserve(1 << 62)


def test_a_map_that_the_kernel_refuses_is_undone(monkeypatch):
    """The second of three pages fails; the first is a hole again, and reads as zeros."""
    memory, page = HostMemory(), mmap.PAGESIZE
    address = memory.reserve(4 * page)
    handles = [memory.create_page(page) for _ in range(3)]
    memory.map(address, handles[0], page)
    memory.write(address, np.full(page, 9, np.uint8))
    memory.unmap(address, page)
    real = memory._mmap_page

    def fail_second(place, num_bytes, access, page_place):
        return 12 if place == address + page else real(place, num_bytes, access, page_place)

    monkeypatch.setattr(memory, "_mmap_page", fail_second)
    with pytest.raises(OutOfPages, match=f"map page {handles[1]} at {address + page:#x}"):
        memory.map_run(address, handles, 3 * page)
    assert memory.usage().mapped == 0
    assert ctypes.string_at(address, page) == bytes(page)
    monkeypatch.undo()
    memory.map_run(address, handles, 3 * page)
    memory.unmap(address, 3 * page)
    for handle in handles:
        memory.destroy_page(handle)
    memory.release(address, 4 * page)


class Refusing:
    """The C library, of which one call fails as if there was no memory."""

    def __init__(self, libc, name):
        self._libc, self._name = libc, name

    def __getattr__(self, name):
        if name != self._name:
            return getattr(self._libc, name)

        def refuse(*_):
            ctypes.set_errno(12)
            return host._FAILED if name == "mmap" else -1

        return refuse


def test_what_the_system_refuses_leaves_the_memory_as_it_was(monkeypatch):
    memory, page = HostMemory(), mmap.PAGESIZE
    address, handle = memory.reserve(page), memory.create_page(page)
    memory.map(address, handle, page)
    memory.write(address, np.full(page, 3, np.uint8))
    files = open_files()
    refused = {
        "mprotect": (lambda: memory.protect(address, page, Access.READ), "protect"),
        "mmap": (lambda: memory.export_fd(handle), f"export: map {page} bytes"),
    }
    for name, (call, why) in refused.items():
        with monkeypatch.context() as patch:
            patch.setattr(memory, "_libc", Refusing(memory._libc, name))
            with pytest.raises(OutOfPages, match=f"{why}.*Cannot allocate"):
                call()

    def unsealed(fd, command, value):
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(host.fcntl, "fcntl", unsealed)
        with pytest.raises(MappingError, match=r"seal the pages \(Linux 5.1\): Invalid argument"):
            memory.export_fd(handle)
    assert open_files() <= files
    assert ctypes.string_at(address, page) == b"\3" * page
    memory.unmap(address, page)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_libc", Refusing(memory._libc, "munmap"))
        with pytest.raises(OutOfPages, match="release"):
            memory.release(address, page)
    memory.release(address, page)
    memory.destroy_page(handle)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(host.sys, "platform", "darwin")
    with pytest.raises(NotImplementedError, match="Linux"):
        HostMemory()


def test_another_kind_of_hole_is_refused():
    with pytest.raises((ValueError, TypeError), match="holes"):
        HostMemory("deep")  # pyright: ignore[reportArgumentType]
