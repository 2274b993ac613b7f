"""Both endpoints against a peer that writes whatever it likes into the slots."""

import contextlib
import dataclasses
import mmap
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases.transport_cases import (
    EXPERTS,
    LAYERS,
    LONG,
    MAX_ROWS,
    batch,
    bits,
    deltas_of,
    exchange,
    open_client,
    open_servers,
    terms_of,
    want_ys,
)

from serving.lora_server.transport.base import PushRows, Status
from serving.lora_server.transport.client_base import AbstractConnector
from serving.lora_server.transport.header import Header, Kind
from serving.lora_server.transport.library import shared_memory
from serving.lora_server.transport.shapes import DOWN, GATE_UP, PAGE
from serving.lora_server.transport.slots import Joined, SlotClient, SlotServer

TERMS = terms_of(ep=1)
SHAPES = TERMS.shapes


class RawServer(AbstractConnector):
    """Slots without a server behind them: the test writes them."""

    def __init__(self):
        self.fd, self.bell = shared_memory(SHAPES.channel_bytes), shared_memory(PAGE)
        self.memory = mmap.mmap(self.fd, SHAPES.channel_bytes)
        self.counters = np.frombuffer(self.memory, np.uint64, 32)
        self.epoch = 0

    def join(self, last_epoch):
        self.counters[:] = 0
        self.epoch = last_epoch + 7
        return Joined(os.dup(self.fd), os.dup(self.bell), self.epoch)

    def watch(self, joined, lost):
        self.lost = lost

    def leave(self):
        pass

    def answer(self, header: Header, deltas=()):
        start = PAGE + SHAPES.request_slot
        for delta, at in zip(deltas, SHAPES.result_offsets(GATE_UP), strict=False):
            self.memory[start + at : start + at + delta.nbytes] = delta.tobytes()
        self.memory[start : start + 64] = header.pack()
        self.counters[16] += 1

    def wait_for_push(self, sequence):
        end = time.monotonic() + LONG
        while self.counters[0] != sequence:
            assert time.monotonic() < end
            time.sleep(0.001)

    def close(self):
        os.close(self.fd)
        os.close(self.bell)


@contextlib.contextmanager
def raw_client():
    server = RawServer()
    client = SlotClient(SHAPES, [server], pull=False)
    client.set_limit(LONG)
    try:
        yield client, server
    finally:
        client.close()
        server.close()


def test_late_and_foreign_answers_are_dropped_and_the_right_one_is_taken():
    x, ys, rows = batch(TERMS, np.random.default_rng(0), 8, base_share=0.0)
    ids = np.asarray(rows.row_to_adapter), np.asarray(rows.row_to_expert)
    deltas = deltas_of(SHAPES, GATE_UP, 1, x, *ids)
    with raw_client() as (client, server):
        right = Header(server.epoch, 1, 1, GATE_UP, 8, Kind.RESPONSE, 3, 8 * 2 * 12 * 4)
        wrong = [
            dataclasses.replace(right, epoch=server.epoch - 1),  # late, of a lost epoch
            dataclasses.replace(right, sequence=0),
            dataclasses.replace(right, sequence=2),
            dataclasses.replace(right, layer=2),
            dataclasses.replace(right, site=DOWN, num_bytes=8 * 20 * 4),
            dataclasses.replace(right, site=9),
            dataclasses.replace(right, rows=7),
            dataclasses.replace(right, rows=1 << 30),
            dataclasses.replace(right, num_bytes=1 << 60),
            dataclasses.replace(right, kind=Kind.REQUEST),
            dataclasses.replace(right, kind=Kind.REFUSAL),  # which has no rows
        ]
        results = []
        step = exchange(client)
        waiter = threading.Thread(target=lambda: results.append(step(x, ys, rows)))
        waiter.start()
        server.wait_for_push(1)
        for count, header in enumerate(wrong, start=1):
            server.answer(header)
            end = time.monotonic() + LONG
            while client.stats().dropped < count:
                assert time.monotonic() < end
                time.sleep(0.001)
        server.answer(right, deltas)
        waiter.join(LONG)
        got, status = results[0]
    assert np.asarray(status).tolist() == [Status.ARRIVED]
    wanted = want_ys(SHAPES, GATE_UP, 1, x, ys, rows)
    assert [bits(y) for y in got] == [bits(y) for y in wanted]


def test_wrong_answers_alone_end_in_a_timeout_and_change_no_bit():
    x, ys, rows = batch(TERMS, np.random.default_rng(0), 8, base_share=0.0)
    with raw_client() as (client, server):
        client.set_limit(0.2)
        server.answer(Header(server.epoch, 1, 1, GATE_UP, 9, Kind.RESPONSE, 3, 0))
        got, status = exchange(client)(x, ys, rows)
        assert np.asarray(status).tolist() == [Status.TIMED_OUT]
        assert [bits(y) for y in got] == [bits(y) for y in ys]
        assert client.stats().dropped == 1


def test_a_push_that_nobody_waited_for_loses_the_server():
    """Its slot may still be read, so it is not written over."""
    x, ys, rows = batch(TERMS, np.random.default_rng(0), 8, base_share=0.0)
    with raw_client() as (client, server):
        push = jax.jit(lambda x, rows: client.push(x, GATE_UP, 1, rows))
        assert bits(push(x, rows)) == bits(x)
        assert (client.lost(), server.counters[0]) == ((), 1)
        slot = server.memory[:]
        jax.block_until_ready(push(x * 2, rows))
        assert client.lost() == (0,)
        assert server.memory[PAGE:] == slot[PAGE:]
        assert np.asarray(exchange(client)(x, ys, rows)[1]).tolist() == [Status.ABORTED]
        assert client.rejoin() == ()
        assert server.epoch == 14


def test_what_is_told_late_of_an_old_epoch_changes_nothing():
    with raw_client() as (client, server):
        old = server.lost
        old()
        assert client.lost() == (0,)
        assert client.rejoin() == ()
        old()
        assert client.lost() == ()
        server.lost()
        assert client.lost() == (0,)


@pytest.mark.parametrize(
    ("rows", "layer", "said"),
    [
        ({"row_to_server": 1}, 0, "a row's server is not one of the client's"),
        ({}, LAYERS, "the layer lies outside the plan"),
        ({}, -1, "the layer lies outside the plan"),
    ],
)
def test_rows_for_nobody_fail_by_name(rows, layer, said):
    x, _, right = batch(TERMS, np.random.default_rng(0), 8, base_share=0.0)
    changed = {name: jnp.full(8, value, jnp.int32) for name, value in rows.items()}
    with raw_client() as (client, server):
        push = jax.jit(lambda x, layer, rows: client.push(x, GATE_UP, layer, rows))
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            push(x, jnp.int32(layer), dataclasses.replace(right, **changed)).block_until_ready()
        assert server.counters[0] == 0


def test_what_does_not_fit_is_refused_while_tracing():
    x, ys, rows = batch(TERMS, np.random.default_rng(0), 8)
    many, _, many_rows = batch(TERMS, np.random.default_rng(0), MAX_ROWS + 1)
    short = dataclasses.replace(rows, row_to_expert=rows.row_to_expert[:7])
    with raw_client() as (client, _):
        for said, call in {
            "25 rows and a landing slot 24": lambda: client.push(many, 0, 0, many_rows),
            "gate_up sends float32": lambda: client.push(x.astype(jnp.bfloat16), 0, 0, rows),
            "down sends float32": lambda: client.push(x, DOWN, 0, rows),
            "site 2 is not one of 2": lambda: client.push(x, 2, 0, rows),
            "row_to_expert must be int32": lambda: client.push(x, 0, 0, short),
            r"adds to \[\(8, 12\), \(8, 12\)\]": lambda: client.wait_add(ys[:1], x, 0, rows),
            "all float32 or all bfloat16": lambda: client.wait_add(
                (ys[0], ys[1].astype(jnp.bfloat16)), x, 0, rows
            ),
            "bounded by more than 0": lambda: client.set_limit(0),
        }.items():
            with pytest.raises(ValueError, match=said):
                call()
        assert client.stats().pushes == 0


def test_a_program_of_another_device_is_refused(monkeypatch):
    x, ys, rows = batch(TERMS, np.random.default_rng(0), 8)
    with raw_client() as (client, _):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        for call in (
            lambda: client.push(x, 0, 0, rows),
            lambda: client.wait_add(ys, x, 0, rows),
        ):
            with pytest.raises(NotImplementedError, match="a program on gpu needs another"):
                call()


class RawClient:
    """A client's end of a server's slots: the test writes them."""

    def __init__(self, server: SlotServer):
        self.number, joined = server.join(4)
        self.epoch = joined.epoch
        self.memory = mmap.mmap(joined.channel, SHAPES.channel_bytes)
        self.counters = np.frombuffer(self.memory, np.uint64, 32)
        os.close(joined.channel)
        os.close(joined.bell)

    def push(self, data: bytes):
        self.memory[PAGE : PAGE + 64] = data
        self.counters[0] += 1


@pytest.fixture(scope="module")
def server():
    made = SlotServer(SHAPES, pull=False)
    yield made
    made.close()


def near(*bounds):
    """Numbers at and around bounds, and far away ones, in 32 bits."""
    close = [bound + step for bound in bounds for step in (-1, 0, 1)]
    return st.sampled_from([*close, -(2**31), 2**31 - 1])


@settings(deadline=None, max_examples=200)
@given(
    st.integers(-1, 1),
    st.integers(-1, 1),
    near(0, LAYERS),
    near(0, 1),
    near(1, MAX_ROWS),
    st.sampled_from([1, 1, 1, 0, 2, 3]),
    st.integers(-8, 8),
)
def test_only_requests_within_all_bounds_are_shown(
    server, epoch, sequence, layer, site, rows, kind, more
):
    """A header with a right checksum is still a stranger's."""
    client = RawClient(server)
    d_in = SHAPES.sites[site].d_in if site in (0, 1) else 1
    num_bytes = max(0, rows * (8 + d_in * 4) + (more if abs(more) > 4 else 0))
    header = Header(client.epoch + epoch, 1 + sequence, layer, site, rows, kind, -5, num_bytes)
    dropped = server.dropped()
    client.push(header.pack())
    request = server.receive(0)
    fits = (epoch, sequence, kind) == (0, 0, Kind.REQUEST) and 0 <= layer < LAYERS
    fits = fits and site in (0, 1) and 1 <= rows <= MAX_ROWS and abs(more) <= 4
    assert (request is not None) == fits
    assert server.dropped() == dropped + (not fits)
    if request is not None:
        said = (request.layer, request.site, request.rows, request.table_version)
        assert said == (layer, site, rows, -5)
        assert request.x.shape == (rows, d_in)
        assert len(request.adapters) == len(request.experts) == rows
        assert server.refuse(request)
    server.leave(client.number)


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=64, max_size=64))
def test_other_bytes_are_dropped(server, data):
    client = RawClient(server)
    client.push(data)
    assert server.receive(0) is None
    server.leave(client.number)


def test_a_counter_that_goes_back_or_leaps_brings_nothing(server):
    client = RawClient(server)
    header = Header(client.epoch, 1, 0, 0, 1, Kind.REQUEST, 0, 88)
    client.push(header.pack())
    assert server.receive(0) is not None
    assert server.receive(0) is None
    client.counters[0] = 0
    assert server.receive(0) is None
    client.counters[0] = 40
    assert server.receive(0) is None
    client.push(dataclasses.replace(header, sequence=41).pack())
    request = server.receive(0)
    assert request is not None
    assert request.sequence == 41
    server.leave(client.number)


def test_clients_are_served_in_turn(server):
    clients = [RawClient(server) for _ in range(3)]
    for sequence in (1, 2):
        for client in clients:
            header = Header(client.epoch, sequence, 0, 0, 1, Kind.REQUEST, 0, 88)
            client.push(header.pack())
        served = [server.receive(0) for _ in clients]
        assert {r.client for r in served if r} == {client.number for client in clients}
    greedy = clients[0]
    served = []
    for client in clients[1:]:
        client.push(Header(client.epoch, 3, 0, 0, 1, Kind.REQUEST, 0, 88).pack())
    for sequence in (3, 4, 5):
        greedy.push(Header(greedy.epoch, sequence, 0, 0, 1, Kind.REQUEST, 0, 88).pack())
        request = server.receive(0)
        served.append(request.client if request else None)
    assert sorted(map(str, served)) == sorted(str(client.number) for client in clients)
    for client in clients:
        server.leave(client.number)


def test_results_that_do_not_fit_are_refused():
    server = SlotServer(SHAPES, pull=False)
    client = RawClient(server)
    client.push(Header(client.epoch, 1, 0, 0, 3, Kind.REQUEST, 0, 3 * 88).pack())
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
    assert client.counters[16] == 0
    assert server.respond(request, [good, np.zeros((9, 24), np.float32)[:, ::2]])
    assert client.counters[16] == 1
    server.leave(client.number)
    assert not server.respond(request, [good, good])
    server.close()
    server.close()
    assert server.receive(10.0) is None
    assert server.aborted()


def test_an_abort_wakes_the_server():
    server = SlotServer(SHAPES, pull=False)
    found = []
    thread = threading.Thread(target=lambda: found.append(server.receive(1000.0)))
    thread.start()
    server.abort()
    thread.join(LONG)
    assert found == [None]
    server.close()


def test_views_outlive_their_client(tmp_path):
    with open_servers("in_process", TERMS, tmp_path) as servers:
        client = open_client("in_process", TERMS, servers, tmp_path)
        x, _, rows = batch(TERMS, np.random.default_rng(0), 8, base_share=0.0)
        client.push(x, GATE_UP, 1, rows).block_until_ready()
        request = servers[0].receive(LONG)
        client.close()
        assert servers[0].clients() == ()
        assert request is not None
        assert bits(request.x) == bits(x)
        assert request.padded(MAX_ROWS)[0].ctypes.data % 64 == 0
        assert request.experts.max() < EXPERTS


def test_a_traced_layer_is_data():
    x, _, rows = batch(TERMS, np.random.default_rng(0), 8, base_share=0.0)
    with raw_client() as (client, server):

        @jax.jit
        def push(x, layer, rows: PushRows):
            return client.push(x, GATE_UP, layer, rows)

        push(x, jnp.int32(3), rows).block_until_ready()
        assert np.frombuffer(server.memory, np.int32, 1, PAGE + 24)[0] == 3
