"""The GPU's memory: anywhere over a host library of the driver's symbols; on a GPU, for real."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.contracts.memory_contract import (
    DriverDoubleContract,
    SharingContract,
    VirtualMemoryContract,
    bytes_of,
    small_tensor,
)
from support.doubles.driver_double import CUDA_OPERATIONS, Double, compile_double
from support.processes.process_facts import open_files

from cuda_backend import driver
from cuda_backend.vmm import CudaDriver
from lora_jax.memory.arena import Arena
from lora_jax.memory.driver import DriverMemory
from lora_jax.memory.platforms import for_platform
from lora_jax.memory.virtual import MappingError
from lora_jax.memory.wire import close_all, send_fds, send_header

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this machine")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    source = Path(__file__).parents[2] / "support" / "doubles" / "cuda_double.c"
    return compile_double(source, tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def double(library):
    control = Double(library, CUDA_OPERATIONS, refusal=1, no_memory=driver.OUT_OF_MEMORY)
    yield control
    assert control.live() == (0, 0, 0)


@pytest.fixture
def memory(double):
    return DriverMemory(CudaDriver(0, double.path))


@needs_gcc
class TestMemory(VirtualMemoryContract):
    """The contract, over the double."""


@needs_gcc
class TestSharing(SharingContract):
    """Export and import in one process, over the double."""


@needs_gcc
class TestRefusals(DriverDoubleContract):
    """One call after another fails."""


@needs_gcc
def test_a_mapping_without_access_is_not_left_behind(double):
    """Where setting the access fails, the driver itself has no mapping either."""
    memory = DriverMemory(CudaDriver(0, double.path))
    page = memory.granularity
    address, handle = memory.reserve(page), memory.create_page(page)
    double.fail("grant", 0)
    with pytest.raises(MappingError, match=r"cuMemSetAccess answers CUDA_ERROR_\w+ \(1\)"):
        memory.map(address, handle, page)
    assert double.live() == (1, 0, 1)
    memory.destroy_page(handle)
    memory.release(address, page)


@needs_gcc
def test_a_device_that_is_not_there_is_refused(double):
    with pytest.raises(MappingError, match="cuDeviceGet"):
        CudaDriver(3, double.path)


@pytest.fixture
def gpu():
    """The memory of the machine's first GPU."""
    memory = for_platform("gpu")
    yield memory
    assert (memory.usage().created, memory.usage().mapped) == (0, 0)


@pytest.mark.gpu
class TestMemoryOfTheGpu(VirtualMemoryContract):
    """The contract, on the device."""

    @pytest.fixture
    def memory(self, gpu):
        return gpu


@pytest.mark.gpu
class TestSharingOnTheGpu(SharingContract):
    """Export and import of device memory in one process."""

    @pytest.fixture
    def memory(self, gpu):
        return gpu


@pytest.mark.gpu
def test_an_array_on_the_gpu_shows_what_is_mapped_and_written_later(gpu):
    """One compiled program, one array: experts come, change and move without a copy."""
    tensor = small_tensor(gpu)
    array = tensor.array
    assert array.unsafe_buffer_pointer() == tensor.address
    total = jax.jit(lambda w, i: jnp.sum(jax.lax.dynamic_index_in_dim(w, i, keepdims=False)))
    rng = np.random.default_rng(0)
    for first in (3, 17, 3):
        values = rng.integers(-3, 4, (2, *tensor.shape[1:])).astype(np.float32)
        tensor.map(range(first, first + 2))
        tensor.write(first, values)
        for i in range(2):
            assert float(total(array, jnp.int32(first + i))) == float(values[i].sum())
        tensor.unmap(range(first, first + 2))
    tensor.close()
    tensor.pool.trim()


@pytest.mark.gpu
def test_the_driver_counts_the_pages_and_gets_them_back(gpu):
    """The second time: the first may leave page tables behind."""
    used = []
    for _ in range(2):
        tensor = small_tensor(gpu)
        before = gpu.usage().device_used
        tensor.map(range(0, 20))
        assert gpu.usage().device_used - before >= tensor.bytes_mapped == 55 * gpu.granularity
        tensor.close()
        tensor.pool.trim()
        used.append(gpu.usage().device_used)
    assert used[0] == used[1]


@pytest.mark.gpu
def test_an_imported_page_of_the_gpu_is_read_only(gpu):
    """The driver itself refuses a write to it."""
    page = gpu.granularity
    address, own = gpu.reserve(2 * page), gpu.create_page(page)
    gpu.map(address, own, page)
    gpu.write(address, bytes_of(page, 0))
    fd = gpu.export_fd(own)
    imported = gpu.import_fd(fd, page)
    os.close(fd)
    gpu.map(address + page, imported, page)
    assert gpu.read(address + page, page) == bytes_of(page, 0).tobytes()
    with pytest.raises(MappingError, match="cuMemcpyHtoD"):
        gpu._driver.copy_in(address + page, bytes_of(16, 1).ctypes.data, 16)
    gpu.unmap(address, 2 * page)
    for handle in (own, imported):
        gpu.destroy_page(handle)
    gpu.release(address, 2 * page)


IMPORTER = """
import socket, sys
from lora_jax.memory.arena import ImportedArena, parse_manifest
from lora_jax.memory.platforms import for_platform
from lora_jax.memory.wire import close_all, receive_fds, receive_header
connection = socket.socket(fileno=int(sys.argv[1]))
manifest = parse_manifest(receive_header(connection))
fds = receive_fds(connection, len(manifest.blocks))
arena = ImportedArena(for_platform("gpu"), manifest, fds)
close_all(fds)
leaf = manifest.leaves["ones"]
array = arena.array("ones", leaf.shape, leaf.dtype)
connection.sendall(str(int(array.sum())).encode())
connection.recv(1)
"""


@pytest.mark.gpu
def test_an_importer_on_the_gpu_that_is_killed_leaks_nothing(gpu):
    arena = Arena(gpu, 8 * gpu.granularity)
    arena.add("ones", np.ones(1000, np.float32)).delete()
    files, used = open_files(), gpu.usage().device_used
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", IMPORTER, str(theirs.fileno())]
        # It shares the device with this process, so it may not take most of its memory.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        importer = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    with ours:
        ours.settimeout(200)
        fds = arena.export()
        send_header(ours, arena.manifest.fields())
        send_fds(ours, fds)
        close_all(fds)
        assert int(ours.recv(20)) == 1000
        importer.send_signal(signal.SIGKILL)
        assert ours.recv(1) == b""
    assert importer.wait(60) == -signal.SIGKILL
    assert open_files() == files
    deadline = time.monotonic() + 60  # the driver clears up after the dead in its own time
    while gpu.usage().device_used > used and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gpu.usage().device_used <= used
    arena.close()
