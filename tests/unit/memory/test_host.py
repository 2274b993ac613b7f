"""The host's memory: the contract over the kernel, holes, faults, sharing."""

import ctypes
import mmap
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
