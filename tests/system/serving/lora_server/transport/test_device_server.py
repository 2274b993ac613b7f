"""Server handling of good and bad messages, over emulated GPUs."""

import ctypes
import dataclasses
import os
import shutil

import jax
import numpy as np
import pytest
from support.cases.transport_cases import MAX_ROWS, terms_of

from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.device_server import DeviceServer, no_ticket
from serving.lora_server.transport.header import Header, Kind
from serving.lora_server.transport.shapes import DOWN, GATE_UP

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


class RawClient:
    """A client's side of a channel as plain memory, which emulated GPUs share with the host."""

    def __init__(self, server, gpus, last_epoch=0):
        identity = gpus.device(0).identity
        found = server.join(last_epoch, identity, local=True)
        self.number, self.channel, fds, self.epoch = found
        for fd in fds:
            os.close(fd)

    def push(self, header: bytes, count: int) -> None:
        ctypes.memmove(self.channel.request_slot, header, len(header))
        ctypes.c_uint64.from_address(self.channel.request_counter).value = count

    def name_rows(self, shapes, adapters) -> None:
        ids = np.asarray(adapters, np.int32)
        ctypes.memmove(
            self.channel.request_slot + shapes.adapters_offset, ids.ctypes.data, ids.nbytes
        )

    def bring_rows(self, shapes, x) -> None:
        ctypes.memmove(self.channel.request_slot + shapes.rows_offset, x.ctypes.data, x.nbytes)

    @property
    def answers(self) -> int:
        return ctypes.c_uint64.from_address(self.channel.response_counter).value


@pytest.fixture
def server(gpus):
    made = DeviceServer(terms_of(ep=1).shapes, gpus.device(1), pull=False)
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


def test_a_program_takes_what_waits_of_one_site_and_fits(server, gpus):
    """The first in turn has its way: everybody is the first some time."""
    clients = [RawClient(server, gpus) for _ in range(4)]
    asked = [(GATE_UP, 0, 3, 5), (DOWN, 1, 2, 0), (GATE_UP, 2, 5, 7), (GATE_UP, 3, 17, 9)]
    for client, (site, layer, rows, version) in zip(clients, asked, strict=True):
        num_bytes = rows * (8 + 4 * server.shapes.sites[site].d_in)
        header = Header(client.epoch, 1, layer, site, rows, Kind.REQUEST, version, num_bytes)
        client.name_rows(server.shapes, range(10 * rows, 11 * rows))
        client.push(header.pack(), 1)
    take = jax.jit(server.take, static_argnums=(1, 2))
    ticket = no_ticket(3)
    for site, wanted in ((GATE_UP, [0, 2]), (DOWN, [1]), (GATE_UP, [3]), (GATE_UP, [])):
        messages, _ = take(ticket, 0, site)
        rows = [asked[place][2] for place in wanted]
        behind = MAX_ROWS - sum(rows)
        lines = [[place, *asked[place]] for place in wanted] + [[-1, -1, 0, 0, 0]]
        got = np.asarray(messages.info)[: len(lines), [0, 1, 2, 3, 4]].tolist()
        assert got == lines
        owners = [m for m, count in enumerate(rows) for _ in range(count)]
        assert messages.row_to_message.tolist() == owners + [-1] * behind
        names = [name for count in rows for name in range(10 * count, 11 * count)]
        assert messages.adapters.tolist() == names + [-1] * behind
        ticket = messages.info
    for client in clients:
        client.channel.close()


def test_a_program_takes_messages_with_their_rows(server, gpus):
    shapes, rng = server.shapes, np.random.default_rng(0)
    clients = [RawClient(server, gpus) for _ in range(3)]
    sent = []
    for place, (client, site) in enumerate(zip(clients, (DOWN, GATE_UP, DOWN), strict=True)):
        x = rng.standard_normal((3 + place, shapes.sites[site].d_in)).astype(shapes.row_dtype)
        num_bytes = len(x) * (8 + x.itemsize * x.shape[1])
        client.name_rows(shapes, range(len(x)))
        client.bring_rows(shapes, x)
        header = Header(client.epoch, 1, 0, site, len(x), Kind.REQUEST, 0, num_bytes)
        client.push(header.pack(), 1)
        sent.append(x)
    take = jax.jit(server.take, static_argnums=(1, 2))
    both, x = take(no_ticket(), 0, DOWN)
    assert both.clients.tolist()[:3] == [0, 2, -1]
    rows = len(sent[0]) + len(sent[2])
    np.testing.assert_array_equal(x[:rows], np.concatenate([sent[0], sent[2]]))
    names = [*range(len(sent[0])), *range(len(sent[2]))]
    assert both.adapters.tolist() == names + [-1] * (MAX_ROWS - rows)
    other, _ = take(both.info, 0, DOWN)  # one of another site waits: nothing, and at once
    assert other.clients.tolist() == [-1] * len(no_ticket())
    assert other.adapters.tolist() == [-1] * MAX_ROWS
    last, x = take(other.info, 0, GATE_UP)
    assert last.clients.tolist()[:2] == [1, -1]
    np.testing.assert_array_equal(x[: len(sent[1])], sent[1])
    for client in clients:
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
