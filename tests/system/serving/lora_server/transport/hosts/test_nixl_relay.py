"""A relay passes on what is a message, and ends where it is not."""

import os
import socket
import threading

import pytest
from support.cases.transport_cases import LONG, terms_of
from support.doubles.nixl_double import Fabric
from support.high_descriptor import high_descriptor

from serving.lora_server.transport.header import Header, Kind
from serving.lora_server.transport.hosts.nixl_relay import Relay, _has_ended
from serving.lora_server.transport.library import calls, shared_memory
from serving.lora_server.transport.shapes import DOWN, PAGE
from serving.lora_server.transport.slots import Joined

SHAPES = terms_of().shapes
REQUEST = Header(1, 1, 2, DOWN, 3, Kind.REQUEST, 7, 0)


class Side:
    """One relay on a thread, its own slots and its end of the connection."""

    def __init__(self, fabric, name, connection, *, beside_client):
        self.slots = Joined(shared_memory(SHAPES.channel_bytes), shared_memory(PAGE), 1)
        self.connection = connection
        self.agent = fabric.agent(name)
        self.relay = Relay(SHAPES, self.slots, self.agent, beside_client=beside_client)
        self.thread = threading.Thread(target=self._run)

    def meet(self, other, name):
        self.agent.add_remote_agent(other.agent.get_agent_metadata())
        self.relay.meet(name, other.relay.landing)

    def _run(self):
        with self.relay as relay:
            relay.run(self.connection)

    def read(self, start, size):
        return os.pread(self.slots.channel, size, start)

    def close(self):
        self.thread.join(LONG)
        assert not self.thread.is_alive()
        self.connection.close()
        os.close(self.slots.channel)
        os.close(self.slots.bell)


@pytest.fixture
def sides():
    fabric, (left, right) = Fabric(), socket.socketpair()
    client = Side(fabric, "client", left, beside_client=True)
    server = Side(fabric, "server", right, beside_client=False)
    client.meet(server, "server")
    server.meet(client, "client")
    for side in (client, server):
        side.thread.start()
    yield client, server
    left.shutdown(socket.SHUT_RDWR)
    for side in (client, server):
        side.close()


def post(side, header, payload=b""):
    at = PAGE + SHAPES.rows_offset
    os.pwrite(side.slots.channel, payload, at)
    os.pwrite(side.slots.channel, header.pack(), PAGE)
    calls().step(side.relay._at, header.sequence)


def arrived(side, counter, want):
    return calls().wait(side.relay._at + counter, want - 1, int(LONG * 1e9)) == want


def test_a_request_lands_whole_and_rings(sides):
    client, server = sides
    size = 3 * SHAPES.sites[DOWN].d_in * SHAPES.row_dtype.itemsize
    payload = bytes(range(256)) * (size // 256 + 1)
    post(client, REQUEST, payload[:size])
    assert arrived(server, 0, 1)
    assert server.read(PAGE, 64) == REQUEST.pack()
    assert server.read(PAGE + SHAPES.rows_offset, size) == payload[:size]
    assert calls().wait(server.relay._bell_at, 0, int(LONG * 1e9)) == 1


def test_a_message_of_another_sequence_ends_the_relay(sides):
    client, _ = sides
    os.pwrite(client.slots.channel, REQUEST.pack(), PAGE)
    calls().step(client.relay._at, 5)
    client.thread.join(LONG)
    assert not client.thread.is_alive()


def test_the_end_of_a_connection_with_a_high_descriptor_is_seen():
    ours, theirs = socket.socketpair()
    with high_descriptor(ours.detach()) as high, socket.socket(fileno=high) as connection:
        assert not _has_ended(connection)
        theirs.close()
        assert _has_ended(connection)
