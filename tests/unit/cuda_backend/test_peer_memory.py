"""Memory that GPUs share, over a double of the driver: refusals leave nothing behind."""

import ctypes
import os
import shutil
from types import SimpleNamespace

import pytest
from support.processes.process_facts import open_files

from cuda_backend import all_gather, driver, host_board
from cuda_backend.all_gather import GatherGroup, PeerLost
from cuda_backend.host_board import HostBoard
from cuda_backend.peer import PeerDevice
from cuda_backend.peer_memory import Device, create_landing, import_landing
from lora_jax.memory.virtual import OutOfPages

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
PAGE = 2 << 20


@pytest.fixture
def device(double) -> Device:
    return Device(0, double.path)


def test_memory_of_one_gpu_is_read_and_written_by_all_users(device, double):
    """Another process maps the descriptor; the memory goes with its last mapping."""
    before = double.live()
    landing, fd = create_landing(device, 1, 100, [0, 1])
    assert landing.num_bytes == PAGE
    assert device.read(landing.address, 4) == bytes(4)
    imported = import_landing(device, fd, 100)
    os.close(fd)
    device.write(landing.address + 8, b"word")
    landing.close()
    landing.close()
    assert device.read(imported.address + 8, 4) == b"word"
    imported.close()
    assert double.live() == before
    with pytest.raises(ValueError, match="the landing is closed"):
        _ = imported.address


@pytest.mark.parametrize("operation", ["create", "export", "reserve", "map", "grant"])
def test_a_refusal_leaves_no_memory_behind(device, double, operation):
    before = double.live()
    double.fail(operation, 0, driver.OUT_OF_MEMORY)
    with pytest.raises(OutOfPages, match="CUDA_ERROR_OUT_OF_MEMORY"):
        create_landing(device, 0, 100, [0])
    assert double.live() == before


def test_a_gpu_is_known_by_its_identity(device, monkeypatch):
    other = Device(2, device.cuda._library._name)
    assert device.identity == "01" * 16
    assert device.number_of(other.identity) == 2
    with pytest.raises(ValueError, match=r"none of the 3 that this process sees: .*CUDA_VISIBLE"):
        device.number_of("ab" * 16)
    monkeypatch.setattr(device, "_reaches", lambda ordinal: False)
    assert device.number_of(device.identity) == 0
    with pytest.raises(ValueError, match="GPU 0 cannot reach the memory of GPU 2"):
        device.number_of(other.identity)


def test_a_gpu_that_exports_nothing_is_refused(double, monkeypatch):
    monkeypatch.setattr(Device, "_attribute", lambda self, attribute: 0)
    with pytest.raises(NotImplementedError, match="device 1 exports no file descriptors"):
        Device(1, double.path)


def test_memory_that_stays_is_zeros_and_plain(device):
    address, host = device.allocate(100), device.allocate_host(100)
    assert device.read(address, 100) == bytes(100) == ctypes.string_at(host, 100)
    assert device.is_plain(address)
    ctypes.memmove(host, bytes(range(100)), 100)
    device.copy_in(address, host, 100)
    device.settle()
    assert device.read(address, 100) == bytes(range(100))
    landing, fd = create_landing(device, 0, 100, [0])
    os.close(fd)
    assert not device.is_plain(landing.address)
    landing.close()


@pytest.fixture
def endpoint(device) -> PeerDevice:
    return PeerDevice(0, SimpleNamespace(load=lambda: 0), device)


def test_a_channel_whose_second_half_fails_leaves_nothing(endpoint, device, double):
    before, files = double.live(), open_files()
    double.fail("create", 1, driver.OUT_OF_MEMORY)
    with pytest.raises(OutOfPages):
        endpoint.create_channel(device.identity, 64, 64, pull=False, local=True)
    channel, fds = endpoint.create_channel(device.identity, 64, 64, pull=True, local=False)
    double.fail("map", 1, driver.OUT_OF_MEMORY)
    with pytest.raises(OutOfPages):
        endpoint.import_channel(fds, 64, 64, pull=True)
    channel.share().close()
    assert double.live() != before  # one of two holders
    channel.close()
    for fd in fds:
        os.close(fd)
    assert double.live() == before
    assert open_files() <= files


def test_kernels_that_do_not_load_are_said(device):
    with pytest.raises(NotImplementedError, match="do not load: CUDA error 209"):
        PeerDevice(0, SimpleNamespace(load=lambda: 209), device)


def test_a_board_is_memory_of_the_host_that_the_device_reads(on_hopper, double, monkeypatch):
    monkeypatch.setattr(host_board, "Device", lambda number: Device(number, double.path))
    board = HostBoard(3)
    board.values[:] = (7, 8, 9)
    board.post(5)
    low, high = map(int, board.address)
    words = board._newest.ctypes.data
    assert low | high << 32 == words
    assert (board.values.ctypes.data - words, int(board._newest[0])) == (64, 5)
    assert not board.was_late(5)
    board._late[5 % 7] = 5  # as the device does
    assert [board.was_late(number) for number in (5, 12)] == [True, False]
    board.end()
    assert int(board._newest[0]) == 2**64 - 1
    monkeypatch.setattr(host_board.platform, "machine", lambda: "aarch64")
    with pytest.raises(NotImplementedError, match=r"aarch64 .*only x86_64 and AMD64"):
        HostBoard(3)


class GatherCalls:
    """The calls of the kernels' library; `codes` are what some answer."""

    def __init__(self, **codes: int):
        self.codes, self.addresses = codes, None

    def load(self, devices):
        return self.codes.get("load", 0)

    def reach(self, number):
        return self.codes.get("reach", 0)

    def bytes(self, devices):
        return 4096

    def status_offset(self):
        return 16

    def new(self, devices, addresses):
        self.addresses = list((ctypes.c_uint64 * devices).from_address(addresses))
        return 3


@pytest.fixture
def gpus(double, monkeypatch):
    """Let GatherGroup find the double's GPUs, and these calls."""
    calls = GatherCalls()
    monkeypatch.setattr(all_gather, "Device", lambda number: Device(number, double.path))
    monkeypatch.setattr(all_gather, "_calls", lambda: calls)
    monkeypatch.setattr(all_gather, "_GROUPS", {})
    return calls


def test_a_group_has_memory_on_each_gpu_and_names_the_one_that_is_lost(gpus):
    group = all_gather.gather_group(3)
    assert (group.number, group.size) == (3, 3)
    addresses = [memory.address for memory in group._memories]
    assert (gpus.addresses, len(set(addresses))) == (addresses, 3)
    assert all_gather.gather_group(3) is group  # it stays as long as the process
    group._devices[1].write(group._memories[1].address + 16, (3).to_bytes(4, "little"))
    with pytest.raises(PeerLost, match="GPU 1 got no answer from GPU 2"):
        all_gather.gather_group(3)


@pytest.mark.parametrize(
    ("devices", "why"), [(1, "2 to 8 devices, got 1"), (9, "got 9"), (5, "5 devices .* are 4")]
)
def test_a_group_of_other_sizes_is_refused(gpus, devices, why):
    with pytest.raises(ValueError, match=why):
        GatherGroup(devices)


@pytest.mark.parametrize(
    ("codes", "why"),
    [({"load": 98}, "do not load: CUDA error 98"), ({"reach": 217}, "GPU 0 does not reach GPU 1")],
)
def test_gpus_that_exchange_nothing_are_refused(gpus, codes, why):
    gpus.codes = codes
    with pytest.raises(NotImplementedError, match=why):
        GatherGroup(2)


def test_results_in_memory_without_peers_are_refused(gpus, monkeypatch):
    monkeypatch.setattr(Device, "is_plain", lambda self, address: False)
    with pytest.raises(NotImplementedError, match="leave XLA_PYTHON_CLIENT_ALLOCATOR"):
        GatherGroup(2)
