"""The transport in a world of symmetric memory keeps the contract, over emulated GPUs."""

import contextlib
import ctypes
import functools
import itertools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from support.cases.transport_cases import (
    LONG,
    batch,
    bits,
    connected,
    exchange,
    open_client,
    open_servers,
    terms_of,
    want_ys,
)
from support.contracts.peer_contract import server_program
from support.contracts.transport_contract import TransportContract
from support.doubles.cuda_emulator import compile_forward
from support.waiting import wait_until

from cuda_backend.nvshmem import ID_BYTES, NvshmemDevice, calls_of
from serving.lora_server.transport import symmetric
from serving.lora_server.transport.base import Status, TransportError
from serving.lora_server.transport.device_server import no_ticket
from serving.lora_server.transport.socket_messages import unix_listener

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
SIZE, FIRST_CLIENT = 8, 4  # of a world; PEs below are servers


class Worlds:
    """A world for each set of servers: PE n is rank n, clients follow."""

    def __init__(self, gpus, calls):
        self._gpus, self._calls = gpus, calls
        self.devices, self._next = [], itertools.count()

    def open_server(self, terms, rank, folder, *, pull=False):
        if pull:
            pytest.skip("nothing is pulled from symmetric memory")
        if rank == 0:
            room = max(terms.shapes.request_slot, terms.shapes.response_slot)
            name = ctypes.create_string_buffer(ID_BYTES)
            assert self._calls.id(name) == 0
            with ThreadPoolExecutor(SIZE) as pool:  # each of them waits for all
                join = functools.partial(self._device, name.raw, room)
                self.devices = list(pool.map(join, range(SIZE)))
            self._next = itertools.count(FIRST_CLIENT)
        listening = unix_listener(folder / f"rank-{rank}")
        return symmetric.open_server(listening, terms, rank, self.devices[rank])

    def open_client(self, terms, servers, folder, **options):
        paths = [folder / f"rank-{rank}" for rank in range(len(servers))]
        device = self.devices[next(self._next)]
        return symmetric.open_client(paths, terms, device, range(len(servers)), **options)

    def _device(self, world, room, pe):
        gpu = 1 if pe < FIRST_CLIENT else 0
        peer = self._gpus.device(gpu)
        return NvshmemDevice(gpu, pe, SIZE, world, room, calls=self._calls, peer=peer)


@pytest.fixture(scope="module")
def worlds(gpus):
    return Worlds(gpus, calls_of(compile_forward()))


class TestWorlds(TransportContract):
    calls_of_a_push = 2  # what is pushed is forwarded

    @pytest.fixture(autouse=True)
    def _transport(self, worlds):
        self.transport = worlds


def test_programs_answer_without_the_host(worlds, tmp_path):
    terms = terms_of(ep=1)
    with open_servers(worlds, terms, tmp_path) as servers:
        program, ended = server_program(servers[0]), threading.Event()

        def serve():
            ticket = jax.numpy.asarray(no_ticket())
            while not ended.is_set():
                ticket = jax.block_until_ready(program(ticket))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with contextlib.closing(open_client(worlds, terms, servers, tmp_path)) as client:
                x, ys, rows = batch(terms, np.random.default_rng(0), 24)
                step = exchange(client)
                for _ in range(3):
                    got, status = step(x, ys, rows)
                    assert not np.asarray(status).any()
                    wanted = want_ys(terms.shapes, 0, 1, x, ys, rows)
                    assert [bits(y) for y in got] == [bits(y) for y in wanted]
        finally:
            ended.set()
            thread.join(LONG)
    assert not thread.is_alive()


def test_late_messages_of_an_old_join_land_elsewhere(worlds, tmp_path):
    terms = terms_of(ep=1)
    with connected(worlds, terms, tmp_path) as (client, servers):
        x, ys, rows = batch(terms, np.random.default_rng(0), 8, base_share=0.2)
        step, channels = exchange(client), []
        for _ in range(6):  # more than there are slots
            assert np.asarray(step(x, ys, rows)[1]).tolist() == [Status.ARRIVED]
            channels.append(next(iter(client._endpoint._channels.values())).request_slot)
            client._connectors[0].leave()
            wait_until(lambda: client.lost() == (0,))
            wait_until(lambda: client.rejoin() == ())
        assert len(set(channels)) == 4
        assert all(a != b for a, b in itertools.pairwise(channels))
        with pytest.raises(TransportError, match="no PE of this world"):
            servers[0].join(1, "a GPU's name", local=False)
    device = worlds.devices[FIRST_CLIENT]
    for server, slot_bytes in ((SIZE, 64), (0, 1 << 30)):
        with pytest.raises(ValueError, match="is not of this world"):
            device.channel_to(server, 64, slot_bytes)


def test_a_short_secret_is_refused_and_the_socket_closed(tmp_path):
    listening = unix_listener(tmp_path / "server")
    with pytest.raises(ValueError, match="16 bytes or more"):
        symmetric.open_server(listening, terms_of(ep=1), 0, None, b"short")
    assert listening.fileno() == -1
