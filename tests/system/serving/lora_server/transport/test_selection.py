"""A process on a CPU meets others in shared memory, one on a GPU in the GPUs'."""

import dataclasses
import shutil
import types

import jax
import pytest
from support.cases.transport_cases import terms_of

from serving.api import cluster_config as config
from serving.lora_server.transport import device_endpoints, selection
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.device_client import DeviceClient
from serving.lora_server.transport.device_server import DeviceServer
from serving.lora_server.transport.selection import RankPlace
from serving.lora_server.transport.slots import SlotClient, SlotServer
from serving.lora_server.transport.world import World

TERMS = terms_of(ep=1)


def test_on_a_cpu_slots_are_shared_memory(tmp_path):
    path = tmp_path / "rank-0"
    server = selection.open_server(path, TERMS, 0)
    client = selection.open_client([path], TERMS)
    assert (type(server), type(client)) == (SlotServer, SlotClient)
    client.close()
    server.close()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_on_a_gpu_they_are_in_its_memory(tmp_path, monkeypatch, gpus):
    asked = []

    def for_platform(platform, number):
        asked.append((platform, number))
        return gpus.device(number)

    here = types.SimpleNamespace(platform="gpu", local_hardware_id=2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [here])
    monkeypatch.setattr(device_endpoints, "for_platform", for_platform)
    path = tmp_path / "rank-0"
    server = selection.open_server(path, TERMS, 0)
    client = selection.open_client([path], TERMS)
    assert (type(server), type(client)) == (DeviceServer, DeviceClient)
    assert asked == [("gpu", 2)] * 2
    in_stream = selection.open_client([path], TERMS, separate_stream=False)
    assert (client._separate_stream, in_stream._separate_stream) == (True, False)
    in_stream.close()
    client.close()
    server.close()


@pytest.mark.parametrize("far", [False, True])
def test_in_a_world_a_rank_listens_before_all_members_join(tmp_path, monkeypatch, far):
    world, asked = World(b"id", 1, 2, one_host=not far), []
    monkeypatch.setattr(
        selection.world_library, "join", lambda *given: asked.append(given) or "gpu"
    )
    for name in ("open_server", "open_client"):
        monkeypatch.setattr(selection.symmetric, name, lambda *given: asked.append(given))
    secret = b"s" * 32
    place = RankPlace(("127.0.0.1", 0) if far else str(tmp_path / "rank-0"), secret)
    door = selection.Door(TERMS, 0, "nvshmem", place)
    door.listen()
    assert (door.port > 0) == far
    door.world = world
    door.open()
    selection.open_client_at([place], TERMS, "nvshmem", world=(world, 2))
    joined, server, client_joined, client = asked
    server[0].close()
    shapes, known = TERMS.shapes, secret if far else None
    assert (joined, client_joined) == ((world, 0, shapes), (world, 2, shapes))
    assert server[1:] == (TERMS, 0, "gpu", known)
    assert client == ([place.address], TERMS, "gpu", range(1), known)


def test_a_platform_without_a_transport_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    here = types.SimpleNamespace(platform="tpu", local_hardware_id=None)
    monkeypatch.setattr(jax, "local_devices", lambda: [here])
    with pytest.raises(NotImplementedError, match="'tpu'"):
        selection.open_server(tmp_path / "rank-0", TERMS, 0)


def test_nixl_is_taken_where_it_is_asked_for_and_not_on_a_gpu(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(selection.nixl, "open_server", lambda *given: asked.append(given))
    monkeypatch.setattr(selection.nixl, "open_client", lambda *given: asked.append(given))
    selection.open_server(tmp_path, TERMS, 3, "nixl")
    selection.open_client([tmp_path], TERMS, "nixl")
    assert asked == [(tmp_path, TERMS, 3), ([tmp_path], TERMS)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(NotImplementedError, match="--lora-server-transport auto"):
        selection.open_server(tmp_path, TERMS, 0, "nixl")
    with pytest.raises(NotImplementedError, match="host memory"):
        selection.open_client([tmp_path], TERMS, "nixl")


def test_over_tcp_a_rank_takes_a_port_and_whoever_knows_the_secret():
    place = RankPlace(("127.0.0.1", 0), b"s" * 32)
    door = selection.Door(TERMS, 0, "tcp", place)
    assert door.port == 0
    server = door.open()
    found = dataclasses.replace(place, address=("127.0.0.1", door.port))
    client = selection.open_client_at([found], TERMS, "tcp")
    assert (type(server), type(client)) == (SlotServer, SlotClient)
    client.close()
    with pytest.raises(TransportError, match="The secrets differ"):
        selection.open_client_at([dataclasses.replace(found, secret=b"t" * 32)], TERMS, "tcp")
    with pytest.raises(OSError, match="in use"):  # a taken port
        selection.Door(TERMS, 0, "tcp", found).open()
    server.close()
    assert "ssss" not in repr(place)


def test_between_hosts_nixl_meets_over_tcp_and_gpus_are_told_what_to_take(monkeypatch):
    asked = []
    monkeypatch.setattr(selection.nixl, "open_far_server", lambda *given: asked.append(given))
    monkeypatch.setattr(selection.nixl, "open_far_client", lambda *given: asked.append(given))
    place = RankPlace(("127.0.0.1", 0), b"s" * 32)
    selection.Door(TERMS, 0, "nixl", place).open()
    selection.open_client_at([place], TERMS, "nixl")
    (listening, *server), client = asked
    listening.close()
    assert (server, client) == ([TERMS, 0, b"s" * 32], ([("127.0.0.1", 0)], TERMS, b"s" * 32))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for transport in ("tcp", "nixl"):
        with pytest.raises(NotImplementedError, match=f"transport {transport} has its slots in ho"):
            selection.Door(TERMS, 0, transport, place).open()
        with pytest.raises(NotImplementedError, match="needs --lora-server-transport auto"):
            selection.open_client_at([place], TERMS, transport)


def test_nvshmem_without_a_world_is_refused(tmp_path):
    place = RankPlace(str(tmp_path / "rank"))
    with pytest.raises(NotImplementedError, match="nvshmem joins the processes of one world"):
        selection.Door(TERMS, 0, "nvshmem", place).open()
    with pytest.raises(NotImplementedError, match="nvshmem joins the processes of one world"):
        selection.open_client_at([place], TERMS, "nvshmem")


def test_a_place_of_this_host_is_a_unix_socket(tmp_path):
    place = RankPlace(str(tmp_path / "rank-0"))
    door = selection.Door(TERMS, 0, "auto", place)
    server = door.open()
    selection.open_client_at([place], TERMS).close()
    assert door.port == 0
    server.close()


def test_the_flag_knows_all_transports():
    assert config.TRANSPORTS == selection.TRANSPORTS
