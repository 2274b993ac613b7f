"""A tensor shown to another process: equal bytes, no writing, and a dead importer leaks nothing."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from support.doubles.faulty_memory import FaultyMemory, Injected, counting_memory
from support.processes.process_facts import open_files

from lora_jax.memory.host import HostMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.share import export_tensor, import_tensor
from lora_jax.memory.virtual import MappingError, OutOfPages
from lora_jax.memory.weight_tensor import WeightTensor
from lora_jax.memory.wire import ShareError, receive

PAGE = 4096
SHAPE = (120, 22, 128)
F32 = np.dtype(np.float32)


@pytest.fixture
def connection():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def memory():
    return FaultyMemory(HostMemory("none"))


@pytest.fixture
def tensor(memory):
    """Experts 0..2 and 50..51, written: 15 pages in 4 blocks, and given back complete."""
    pool = PagePool(memory, page_bytes=PAGE, budget_bytes=1 << 21)
    made = WeightTensor(pool, SHAPE, F32)
    for run in (range(3), range(50, 52)):
        made.map(run)
        made.write(run.start, experts(run))
    yield made
    made.close()
    assert pool.stats().in_use == 0
    pool.trim()
    assert (memory.usage().created, memory.usage().mapped) == (0, 0)


def experts(run: range) -> np.ndarray:
    rng = np.random.default_rng(run.start)
    return rng.standard_normal((len(run), *SHAPE[1:]), np.float32)


def test_the_importer_sees_the_same_experts(tensor, connection):
    files = open_files()
    importer = HostMemory("none")
    lease = export_tensor(connection[0], tensor)
    got = import_tensor(connection[1], importer)
    assert (got.shape, got.dtype, got.mapped) == (SHAPE, F32, (0, 1, 2, 50, 51))
    for run in (range(3), range(50, 52)):
        for index, want in zip(run, experts(run), strict=True):
            np.testing.assert_array_equal(np.asarray(got.array[index]), want)
    assert importer.usage().created == 0
    assert importer.usage().mapped == tensor.bytes_mapped
    tensor.write(50, experts(range(7, 8)))
    np.testing.assert_array_equal(np.asarray(got.array[50]), experts(range(7, 8))[0])
    with pytest.raises(MappingError, match="READ"):
        importer.write(got.address, np.ones(4, np.uint8))
    got.close()
    got.close()
    lease.close()
    assert importer.usage().mapped == 0
    assert open_files() <= files
    for name in ("array", "address"):
        with pytest.raises(ValueError, match="closed"):
            getattr(got, name)


def test_exported_pages_are_not_reused_while_the_lease_holds(tensor, connection):
    importer = HostMemory("none")
    lease = export_tensor(connection[0], tensor)
    got = import_tensor(connection[1], importer)
    tensor.unmap(range(50, 52))
    before = tensor.pool.stats()
    tensor.map(range(90, 92))
    tensor.write(90, experts(range(3, 5)))
    np.testing.assert_array_equal(np.asarray(got.array[51]), experts(range(50, 52))[1])
    assert tensor.pool.stats().created == before.created + 6
    got.close()
    lease.close()
    lease.close()
    assert tensor.pool.stats().free >= 6


def test_more_pages_than_one_message_carries(connection, memory):
    pool = PagePool(memory, page_bytes=PAGE, budget_bytes=600 * PAGE)
    tensor = WeightTensor(pool, (300, 32, 64), F32)  # 2 pages an expert
    for index in range(300):
        tensor.map(range(index, index + 1))
    tensor.write(299, np.full((1, 32, 64), 3, np.float32))
    lease = export_tensor(connection[0], tensor)
    got = import_tensor(connection[1], HostMemory("none"))
    assert float(np.asarray(got.array[299]).sum()) == 3 * 32 * 64
    got.close()
    lease.close()
    tensor.close()
    pool.trim()


IMPORTER = """
import ctypes, socket, sys
import numpy as np
from lora_jax.memory.host import HostMemory
from lora_jax.memory.share import import_tensor
connection = socket.socket(fileno=int(sys.argv[1]))
tensor = import_tensor(connection, HostMemory("none"))
connection.sendall(np.asarray(tensor.array[51]).tobytes())
if sys.argv[2] == "write":
    ctypes.memset(tensor.address, 1, 1)
connection.recv(1)
"""


@pytest.mark.parametrize("end", ["killed", pytest.param("write", marks=pytest.mark.long)])
def test_an_importer_that_dies_leaks_nothing_and_changes_nothing(tensor, memory, end):
    """kill -9 in the middle of its life; or the kernel's answer to a write."""
    files, usage, in_use = open_files(), memory.usage(), tensor.pool.stats().in_use
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", IMPORTER, str(theirs.fileno()), end]
        importer = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with ours:
        ours.settimeout(120)
        lease = export_tensor(ours, tensor)
        want = experts(range(50, 52))[1].tobytes()
        assert receive(ours, len(want)) == want
        if end == "killed":
            os.kill(importer.pid, signal.SIGKILL)
        assert ours.recv(1) == b""  # the end of the connection says so
        lease.close()
    died_by = {"killed": signal.SIGKILL, "write": signal.SIGSEGV}[end]
    assert importer.wait(120) == -died_by
    assert (memory.usage(), tensor.pool.stats().in_use) == (usage, in_use)
    assert open_files() <= files
    np.testing.assert_array_equal(np.asarray(tensor.array[0]), experts(range(3))[0])


@pytest.mark.parametrize("after", [0, 3])
def test_an_export_that_fails_keeps_nothing(tensor, memory, connection, after):
    files, in_use = open_files(), tensor.pool.stats().in_use
    memory.fail("export_fd", after)
    with pytest.raises(Injected):
        export_tensor(connection[0], tensor)
    connection[1].close()
    with pytest.raises(OSError, match="pipe"):
        export_tensor(connection[0], tensor)
    assert tensor.pool.stats().in_use == in_use
    assert open_files() < files  # one end of the connection is closed
    blocks, _ = tensor.retain_pages()
    for block in blocks.values():
        tensor.pool.release(block)
    tensor.unmap(range(3))
    assert tensor.pool.stats().free == 9  # no reference was left on them


@pytest.mark.parametrize("operation", ["import_fd", "map_run", "reserve"])
def test_an_import_that_fails_keeps_nothing(tensor, connection, operation):
    files = open_files()
    importer = FaultyMemory(HostMemory("none"))
    lease = export_tensor(connection[0], tensor)
    importer.fail(operation, 0 if operation == "reserve" else 1)
    with pytest.raises(Injected):
        import_tensor(connection[1], importer)
    lease.close()
    assert importer.usage().mapped == 0
    assert open_files() <= files


def test_a_peer_that_goes_away_in_the_middle_is_said(tensor, connection):
    ours, theirs = connection
    header = {"shape": SHAPE, "dtype": "float32", "page_bytes": PAGE, "pages": [[0, 2]]}
    text = json.dumps({**header, "mapped": []}).encode()
    ours.sendall(len(text).to_bytes(8, "little") + text)
    ours.close()
    files = open_files()
    with pytest.raises(ShareError, match="0 of 1 blocks"):
        import_tensor(theirs, HostMemory("none"))
    assert open_files() <= files


def test_descriptors_that_do_not_arrive_are_said(tensor, connection):
    """The importer's limit on open files cuts the message short; what came is closed again."""
    lease = export_tensor(connection[0], tensor)
    importer, files = HostMemory("none"), open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, hard))
    filling: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(0))
        os.close(filling.pop())
        os.close(filling.pop())
        with pytest.raises((ShareError, OutOfPages)):
            import_tensor(connection[1], importer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filling:
            os.close(fd)
    lease.close()
    assert open_files() <= files


GOOD = {"shape": [4, 8, 128], "dtype": "float32", "page_bytes": PAGE, "pages": [], "mapped": []}


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [4, 8]},
        {"shape": [4, 0, 8]},
        {"dtype": "no such"},
        {"page_bytes": 0},
        {"pages": [[0, 5]]},
        {"pages": [[1, 1]]},
        {"pages": [[2, 3], [0, 1]]},
        {"mapped": [[3, 5]]},
        {"mapped": 3},
    ],
)
def test_a_header_that_makes_no_sense_is_refused(connection, change):
    text = json.dumps(GOOD | change).encode()
    connection[0].sendall(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ShareError, match="header cannot be read"):
        import_tensor(connection[1], HostMemory("none"))


def test_other_talk_is_refused(connection):
    connection[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ShareError, match="not one of ours"):
        import_tensor(connection[1], HostMemory("none"))
    with contextlib.suppress(BlockingIOError):
        connection[1].recv(100, socket.MSG_DONTWAIT)
    connection[0].close()
    with pytest.raises(ShareError, match="ended after 0 of 8"):
        import_tensor(connection[1], HostMemory("none"))


def test_a_memory_without_descriptors_says_so(connection):
    memory, _ = counting_memory(PAGE)
    pool = PagePool(memory, page_bytes=PAGE, budget_bytes=8 * PAGE)
    tensor = WeightTensor(pool, (4, 8, 128), F32)
    tensor.map(range(1))
    with pytest.raises(NotImplementedError, match="descriptor"):
        export_tensor(connection[0], tensor)
    tensor.unmap(range(1))
    assert pool.stats().in_use == 0
