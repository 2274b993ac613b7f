"""The transport between devices: its contract, over emulated GPUs."""

import ctypes
import dataclasses
import shutil

import jax
import numpy as np
import pytest
from peer_contract import PeerContract
from peer_double import EmulatedGpus, OneProcess, Sockets
from transport_cases import batch, bits, exact_deltas, exchange, open_servers, terms_of, want_ys

from serving.transport import device_memory
from serving.transport.base import Status, TransportError
from serving.transport.header import Header, Kind
from serving.transport.shapes import GATE_UP

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def gpus(tmp_path_factory) -> EmulatedGpus:
    return EmulatedGpus(tmp_path_factory.mktemp("gpus"))


class TestSockets(PeerContract):
    @pytest.fixture(autouse=True)
    def _carrier(self, gpus):
        self.carrier = Sockets(gpus)


class TestOneProcess(PeerContract):
    @pytest.fixture(autouse=True)
    def _carrier(self, gpus):
        self.carrier = OneProcess(gpus)


class RawClient:
    """A client's side of a channel as plain memory, which emulated GPUs share with the host."""

    def __init__(self, server, gpus, last_epoch=0):
        identity = gpus.device(0).identity
        found = server.join(last_epoch, identity, local=True)
        self.number, self.channel, fds, self.epoch = found
        device_memory._close(fds)

    def push(self, header: bytes, count: int) -> None:
        ctypes.memmove(self.channel.request_slot, header, len(header))
        ctypes.c_uint64.from_address(self.channel.request_counter).value = count

    @property
    def answers(self) -> int:
        return ctypes.c_uint64.from_address(self.channel.response_counter).value


@pytest.fixture
def server(gpus):
    made = device_memory.DeviceServer(terms_of(ep=1).shapes, gpus.device(1), pull=False)
    yield made
    made.close()


def test_only_whole_messages_of_this_epoch_are_taken(server, gpus):
    client = RawClient(server, gpus)
    good = Header(client.epoch, 1, 0, 0, 1, Kind.REQUEST, 0, 88)
    wrong = [
        dataclasses.replace(good, epoch=client.epoch - 1),
        dataclasses.replace(good, epoch=client.epoch + 1),
        dataclasses.replace(good, layer=4),
        dataclasses.replace(good, layer=-1),
        dataclasses.replace(good, site=2),
        dataclasses.replace(good, rows=0),
        dataclasses.replace(good, rows=25),
        dataclasses.replace(good, kind=Kind.RESPONSE),
        dataclasses.replace(good, num_bytes=87),
    ]
    count = 0
    for header in wrong:
        count += 1
        client.push(dataclasses.replace(header, sequence=count).pack(), count)
        assert server.receive(0) is None
    for damage in (0, 4, 60):  # magic, checksum, reserved
        count += 1
        data = bytearray(dataclasses.replace(good, sequence=count).pack())
        data[damage] ^= 1
        client.push(bytes(data), count)
        assert server.receive(0) is None
    client.push(dataclasses.replace(good, sequence=count).pack(), count + 1)
    assert server.receive(0) is None
    assert server.dropped() == len(wrong) + 4
    count += 2
    client.push(dataclasses.replace(good, sequence=count).pack(), count)
    assert server.receive(0) is not None
    assert server.receive(0) is None
    client.channel.close()


def test_an_answer_to_an_epoch_given_up_is_not_heard(server, gpus):
    """The server answers late: after the client gave the exchange up and joined anew."""
    terms = terms_of(ep=1)
    client = device_memory.open_local_client([server], gpus.device(0))
    client.set_limit(0.02)
    x, ys, rows = batch(terms, np.random.default_rng(0), 24, base_share=0.0)
    got, status = exchange(client)(x, ys, rows)
    assert np.asarray(status).tolist() == [Status.TIMED_OUT]
    late = server.receive(1.0)
    assert late is not None
    assert client.rejoin() == ()
    assert not server.respond(late, exact_deltas(late, terms.shapes))
    jax.block_until_ready(client.push(x, GATE_UP, 1, rows))
    fresh = server.receive(1.0)
    assert fresh is not None
    assert fresh.epoch > late.epoch
    assert server.respond(fresh, exact_deltas(fresh, terms.shapes))
    got, status = client.wait_add(ys, x, GATE_UP, rows)
    assert np.asarray(status).tolist() == [Status.ARRIVED]
    wanted = want_ys(terms.shapes, GATE_UP, 1, x, ys, rows)
    assert [bits(y) for y in got] == [bits(y) for y in wanted]
    client.close()


def test_clients_are_served_in_turn(server, gpus):
    clients = [RawClient(server, gpus) for _ in range(3)]
    for count in (1, 2):
        for client in clients:
            header = Header(client.epoch, count, 0, 0, 1, Kind.REQUEST, 0, 88)
            client.push(header.pack(), count)
        served = [server.receive(0) for _ in clients]
        assert [r.client for r in served if r] == [client.number for client in clients]
    for client in clients:
        server.leave(client.number)
        client.channel.close()


def test_a_refusal_has_no_rows(server, gpus):
    client = RawClient(server, gpus)
    client.push(Header(client.epoch, 1, 2, 0, 3, Kind.REQUEST, 7, 264).pack(), 1)
    request = server.receive(0)
    assert request is not None
    assert (request.layer, request.rows, request.table_version) == (2, 3, 7)
    assert server.refuse(request)
    said = ctypes.string_at(client.channel.response_slot, 64)
    wanted = Header(client.epoch, 1, 2, 0, 0, Kind.REFUSAL, 7, 0)
    assert (said, client.answers) == (wanted.pack(), 1)
    server.leave(client.number)
    assert not server.refuse(request)
    client.channel.close()


def test_results_that_do_not_fit_are_refused(server, gpus):
    client = RawClient(server, gpus)
    client.push(Header(client.epoch, 1, 0, 0, 3, Kind.REQUEST, 0, 264).pack(), 1)
    request = server.receive(0)
    assert request is not None
    good = np.zeros((3, 12), np.float32)
    for said, deltas in {
        "has 2 outputs, got 1": [good],
        r"output 1 of gate_up must be float32 \[3 or more, 12\], got float64": [
            good,
            good.astype(np.float64),
        ],
        r"output 0 of .* got float32 \(2, 12\)": [good[:2], good],
        r"output 0 of .* got float32 \(3, 11\)": [good[:, :11], good],
    }.items():
        with pytest.raises(ValueError, match=said):
            server.respond(request, deltas)
    assert client.answers == 0
    client.channel.close()


def test_a_gpu_that_the_server_does_not_see_is_refused(server):
    with pytest.raises(TransportError, match="none of the 3 that this process sees"):
        server.join(0, "00" * 16, local=False)
    assert server.clients() == ()


def test_a_full_or_closed_server_lets_nobody_in(server, gpus):
    clients = [RawClient(server, gpus) for _ in range(32)]
    with pytest.raises(TransportError, match="full"):
        RawClient(server, gpus)
    server.leave(clients[5].number)
    clients.append(RawClient(server, gpus))
    server.close()
    with pytest.raises(TransportError, match="closed"):
        RawClient(server, gpus)
    assert server.receive(1.0) is None
    for client in clients:
        client.channel.close()


def test_memory_of_another_size_is_refused(gpus, tmp_path):
    """The handshake agrees; what came with it does not."""
    terms = terms_of(ep=1)
    with open_servers(Sockets(gpus), terms, tmp_path) as servers:
        ends, create = gpus.device(1), servers[0]._ends.create_channel
        servers[0]._ends = ends
        ends.create_channel = lambda client, request, response, **how: create(
            client, request + (4 << 20), response, **how
        )
        with pytest.raises(TransportError, match="cannot be mapped"):
            Sockets(gpus).open_client(terms, servers, tmp_path)


def test_servers_of_other_shapes_are_refused(gpus):
    shapes = [terms_of(dtype).shapes for dtype in ("float32", "bfloat16")]
    servers = [device_memory.DeviceServer(s, gpus.device(1), pull=False) for s in shapes]
    with pytest.raises(ValueError, match="2 shapes"):
        device_memory.open_local_client(servers, gpus.device(0))
    for server in servers:
        server.close()
