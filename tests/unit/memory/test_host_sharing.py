"""Pages of the host shown to other processes: read-only there, one descriptor for many."""

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from support.processes.process_facts import open_files

from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import MappingError


@pytest.fixture(params=["zero", "none"])
def memory(request):
    return HostMemory(request.param)


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
