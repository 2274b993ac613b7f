"""The world of NVSHMEM before it begins: package, library, errors; over doubles."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cuda_backend import all_gather, ffi, nvshmem, peer
from cuda_backend.peer import PeerDevice
from lora_jax.ops import native


class Gpu:
    """A device of which nothing but its context is used."""

    identity = "ab" * 16

    def current(self):
        return contextlib.nullcontext()

    def allocate(self, num_bytes):
        return 1 << 20


@pytest.fixture
def peer_device() -> PeerDevice:
    return PeerDevice(0, SimpleNamespace(load=lambda: 0), Gpu())


def world_calls(**answers) -> SimpleNamespace:
    """Return the calls of a world; each answers success or what is given."""
    said = {"init": 0, "load": 0, "heap": 1 << 30, "new": 0, "id": 0, **answers}
    return SimpleNamespace(**{name: lambda *_, value=value: value for name, value in said.items()})


def join(peer_device, **answers):
    calls = world_calls(**answers)
    return nvshmem.NvshmemDevice(0, 2, 4, b"world", 5000, calls=calls, peer=peer_device)


def test_a_pe_is_named_by_its_rank_and_has_room_for_slots(peer_device):
    device = join(peer_device)
    assert (device.identity, device._room) == ("pe 2", 3 * 4096)
    channel = nvshmem.SymmetricChannel(0, 4096, 1, 8192)
    assert channel.share() is channel
    channel.close()
    assert (channel.request_slot, channel.response_slot) == (4096, 8192)


def test_a_pe_has_slots_for_those_that_it_exchanges_with(peer_device):
    """Of PEs 0 to 3 the first is a server: others send to it, and get answers from it alone."""
    asked = []
    calls = world_calls()
    calls.heap = lambda num_bytes: asked.append(num_bytes) or 1 << 30
    peer_device.device.zero = lambda address, num_bytes: None

    def joined(rank):
        given = 0, rank, 4, b"world", 5000
        return nvshmem.NvshmemDevice(*given, servers=1, calls=calls, peer=peer_device)

    server, client = joined(0), joined(2)
    room = 3 * 4096
    assert asked == [2 * 3 * 4 * room] * 2
    there, _ = server.create_channel("pe 2 turn 1", 4096, 4096, pull=False, local=False)
    client.next_turn()
    here = client.channel_to(0, 4096, 4096)
    assert (here.target, there.target) == (there.request_counter, here.response_counter)
    assert {c.request_counter for c in (here, there)} != {c.response_counter for c in (here, there)}
    for device, pe in ((client, 1), (client, 2), (server, 0)):
        with pytest.raises(ValueError, match=f"PE {pe} with slots .* is not of this world"):
            device.channel_to(pe, 4096, 4096)


@pytest.mark.parametrize(
    ("answers", "error", "why"),
    [
        ({"init": 7}, RuntimeError, "does not begin as PE 2 of 4: error 7"),
        ({"load": 209}, NotImplementedError, "does not load: CUDA error 209"),
        ({"heap": 0}, RuntimeError, "has no .* bytes for slots"),
    ],
)
def test_a_world_that_does_not_begin_is_said(peer_device, answers, error, why):
    with pytest.raises(error, match=why):
        join(peer_device, **answers)


def test_more_sites_than_the_kernels_take_are_refused(peer_device):
    with pytest.raises(ValueError, match="at most 4 sites of 4 outputs"):
        nvshmem._Forwarding(join(peer_device), np.zeros(4))


def test_settings_of_the_user_stay(monkeypatch):
    for name in {*nvshmem.ONE_HOST, *nvshmem.SEVERAL_HOSTS}:
        monkeypatch.setenv(name, "")  # so that what `configure` sets is undone
        monkeypatch.delenv(name)
    first = next(iter(nvshmem.SEVERAL_HOSTS))
    monkeypatch.setenv(first, "the user's")
    nvshmem.configure(one_host=False)
    assert os.environ[first] == "the user's"
    others = set(nvshmem.SEVERAL_HOSTS) - {first}
    assert all(os.environ[name] == nvshmem.SEVERAL_HOSTS[name] for name in others)


def test_a_launcher_joins_as_the_hosts_need_it(peer_device, monkeypatch):
    configured, joined = [], []
    monkeypatch.setattr(nvshmem, "configure", lambda one_host: configured.append(one_host))
    monkeypatch.setattr(nvshmem, "new_id", lambda: b"id")
    monkeypatch.setattr(
        nvshmem, "NvshmemDevice", lambda *given, servers: joined.append((*given, servers))
    )
    library = nvshmem.Nvshmem()
    assert library.new_id(one_host=True) == b"id"
    library.join(0, 2, 3, b"id", 4096, servers=1, one_host=False)
    assert (configured, joined) == ([True, False], [(0, 2, 3, b"id", 4096, 1)])


@pytest.fixture
def package(tmp_path, monkeypatch, on_hopper) -> Path:
    """A folder as the package's, whose host library is not loaded."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / nvshmem._HOST_LIBRARY).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(nvshmem.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(nvshmem.ctypes, "CDLL", lambda path, mode=0: path)
    return tmp_path


def test_the_library_is_built_against_the_package(package):
    assert nvshmem.package() == package
    library = nvshmem.library(package)
    assert {f"-I{package / 'include'}", "-rdc=true"} <= set(library.flags)
    assert library.targets == (nvshmem.FORWARD_AFTER,)
    assert all(source.exists() for source in library.sources)


def test_no_package_is_said(monkeypatch):
    monkeypatch.setattr(nvshmem.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="nvidia-nvshmem-cu13; install it"):
        nvshmem.package()


def test_a_world_has_an_id_or_an_error(package, monkeypatch):
    built = SimpleNamespace(load=lambda cache: "library")
    monkeypatch.setattr(nvshmem, "library", lambda folder: built)
    monkeypatch.setattr(nvshmem, "calls_of", lambda library: world_calls())
    assert len(nvshmem._calls.__wrapped__().__dict__) == 5
    monkeypatch.setattr(nvshmem, "_calls", world_calls)
    assert nvshmem.new_id() == bytes(nvshmem.ID_BYTES)
    monkeypatch.setattr(nvshmem, "_calls", lambda: world_calls(id=3))
    with pytest.raises(RuntimeError, match="nvshmemx_get_uniqueid: 3"):
        nvshmem.new_id()


def test_a_kernel_that_is_not_built_declines(package, monkeypatch):
    def load(cache):
        raise native.BuildError("no nvcc here")

    monkeypatch.setattr(nvshmem, "library", lambda folder: SimpleNamespace(load=load))
    with pytest.raises(NotImplementedError, match="no nvcc here"):
        nvshmem._calls.__wrapped__()


@pytest.mark.parametrize("module", [peer, all_gather], ids=["peer", "all_gather"])
def test_calls_of_the_host_are_those_of_the_one_library(on_hopper, monkeypatch, module):
    """XLA has loaded the same path: there is one set of groups and states."""
    built = []
    library = SimpleNamespace(build=lambda cache: built.append(cache) or "kernels.so")
    monkeypatch.setattr(ffi, "library", lambda: library)
    monkeypatch.setattr(module.ctypes, "CDLL", lambda path: f"loaded {path}")
    monkeypatch.setattr(native, "Calls", lambda loaded, prefix, calls: (loaded, prefix))
    monkeypatch.setattr(peer, "calls_of", lambda loaded: (loaded, "calls"))
    loaded, _ = module._calls.__wrapped__()
    assert (loaded, len(built)) == ("loaded kernels.so", 1)
