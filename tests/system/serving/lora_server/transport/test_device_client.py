"""Client errors for late or lost servers, over emulated GPUs."""

import shutil

import jax
import numpy as np
import pytest
from support.cases.transport_cases import (
    LONG,
    batch,
    bits,
    exact_deltas,
    exchange,
    terms_of,
    want_ys,
)

from serving.lora_server.transport import device_memory
from serving.lora_server.transport.base import Status, TransportError
from serving.lora_server.transport.client_base import AbstractConnector
from serving.lora_server.transport.device_client import DeviceClient
from serving.lora_server.transport.device_server import DeviceServer
from serving.lora_server.transport.shapes import GATE_UP

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture
def server(gpus):
    made = DeviceServer(terms_of(ep=1).shapes, gpus.device(1), pull=False)
    yield made
    made.close()


def test_an_answer_to_an_epoch_given_up_is_not_heard(server, gpus):
    """The server answers late: after the client gave the exchange up and joined anew."""
    terms = terms_of(ep=1)
    client = device_memory.open_local_client([server], gpus.device(0))
    client.set_limit(0.02)
    x, ys, rows = batch(terms, np.random.default_rng(0), 24, base_share=0.0)
    got, status = exchange(client)(x, ys, rows)
    assert np.asarray(status).tolist() == [Status.TIMED_OUT]
    late = server.receive(LONG)
    assert late is not None
    assert client.rejoin() == ()
    assert not server.respond(late, exact_deltas(late, terms.shapes))
    jax.block_until_ready(client.push(x, GATE_UP, 1, rows))
    fresh = server.receive(LONG)
    assert fresh is not None
    assert fresh.epoch > late.epoch
    assert server.respond(fresh, exact_deltas(fresh, terms.shapes))
    got, status = client.wait_add(ys, x, GATE_UP, rows)
    assert np.asarray(status).tolist() == [Status.ARRIVED]
    wanted = want_ys(terms.shapes, GATE_UP, 1, x, ys, rows)
    assert [bits(y) for y in got] == [bits(y) for y in wanted]
    client.close()


@pytest.mark.parametrize("num_rows", [64, 65, 200])
def test_more_rows_than_a_cta_has_threads_arrive_in_place(gpus, num_rows):
    """A CTA, here of 64 threads, lists the rows that go as many at a time."""
    terms = terms_of(ep=2, max_rows=num_rows)
    servers = [DeviceServer(terms.shapes, gpus.device(1), pull=False) for _ in range(2)]
    client = device_memory.open_local_client(servers, gpus.device(0))
    client.set_limit(LONG)
    x, ys, rows = batch(terms, np.random.default_rng(0), num_rows)
    jax.block_until_ready(client.push(x, GATE_UP, 1, rows))
    for server in servers:
        request = server.receive(LONG)
        assert request is not None
        assert server.respond(request, exact_deltas(request, terms.shapes))
    got, status = client.wait_add(ys, x, GATE_UP, rows)
    assert np.asarray(status).tolist() == [Status.ARRIVED] * 2
    wanted = want_ys(terms.shapes, GATE_UP, 1, x, ys, rows)
    assert [bits(y) for y in got] == [bits(y) for y in wanted]
    client.close()
    for server in servers:
        server.close()


def test_a_client_joins_all_servers_or_none(gpus):
    """Nobody is kept waiting by a client that did not come to be."""
    terms = terms_of(ep=2)
    servers = [DeviceServer(terms.shapes, gpus.device(1), pull=False) for _ in range(2)]
    servers[1].close()
    with pytest.raises(TransportError, match="closed"):
        device_memory.open_local_client(servers, gpus.device(0))
    assert servers[0].clients() == ()
    servers[0].close()


def test_more_servers_than_the_kernels_take_are_refused(gpus):
    with pytest.raises(ValueError, match="32 servers, not 33"):
        DeviceClient(terms_of().shapes, [Nobody()] * 33, gpus.device(0), separate_stream=False)


class Nobody(AbstractConnector):
    def join(self, last_epoch):
        raise TransportError("there is nobody")

    def watch(self, landed, lost):
        raise AssertionError("nobody has joined")

    def leave(self):
        pass


def test_a_wait_needs_a_bound(server, gpus):
    client = device_memory.open_local_client([server], gpus.device(0))
    with pytest.raises(ValueError, match="bounded by more than 0"):
        client.set_limit(0)
    client.close()
