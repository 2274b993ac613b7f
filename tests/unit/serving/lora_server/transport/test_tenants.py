"""Tenants behind their channels: deltas as numpy has them, and each tenant's failure its own."""

import dataclasses
import mmap
import os
import socket
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.processes.process_facts import open_files
from support.waiting import wait_until

from lora_jax.ops.native import BuildError
from serving.lora_server.transport import tenants
from serving.lora_server.transport.base import PushRows, Status, TransportError
from serving.lora_server.transport.library import shared_memory
from serving.lora_server.transport.shapes import Shapes, Site
from serving.lora_server.transport.tenants import MAP, Seat, TenantClient, TenantServer

SHAPES = Shapes(2, 8, "float32", "float32", (Site("qk", 16, (16, 32)), Site("down", 32, (16,))))
RANK = 4
QUICK_S = 0.02  # of an answer


@pytest.fixture
def tenant():
    """Makes tenants, which end with the test."""
    made = []

    def make(*given: int) -> SimpleNamespace:
        made.append(make_tenant(*given))
        return made[-1]

    yield make
    for one in made:
        one.server.stop()
        for thread in one.threads:
            thread.join(60)
        one.server.close()


def make_tenant(seed: int, experts: int = 1) -> SimpleNamespace:
    """A tenant's server, and its matrices by [layer, output]: random ones of rank 4."""
    rng, maps, weights = np.random.default_rng(seed), np.zeros((2, 3), MAP), {}
    widths = [(16, 16), (16, 32), (32, 16)]
    for layer in range(2):
        for output, (d_in, d_out) in enumerate(widths):
            if (layer, output) == (1, 1):
                continue  # nothing there
            a = rng.standard_normal((experts, RANK, d_in), np.float32)
            b = rng.standard_normal((experts, RANK, d_out), np.float32)
            weights[layer, output] = a, b
            stride = RANK if experts > 1 else 0
            rows = (experts * RANK,) * 2
            maps[layer, output] = (a.ctypes.data, b.ctypes.data, *rows, RANK, stride, stride, 0.5)
    return SimpleNamespace(server=TenantServer(SHAPES, maps, weights), weights=weights, threads=[])


@pytest.fixture
def client():
    made = TenantClient(SHAPES, 3)
    made.set_limit(60.0)
    yield made
    made.close()


def sit(client: TenantClient, number: int, one: SimpleNamespace, *, runs: bool = True):
    gone = threading.Event()
    client.sit(number, one.server.join(client.last_epoch(number)), gone.set)
    if runs:
        one.threads.append(threading.Thread(target=one.server.run, daemon=True))
        one.threads[0].start()
    return gone


def exchange(client, x, seats, experts=None, site=0, layer=0):
    """Return what came back for rows of x, from zeros, and the statuses."""
    seats = jnp.asarray(seats, jnp.int32)
    experts = jnp.zeros_like(seats) if experts is None else jnp.asarray(experts, jnp.int32)

    @jax.jit
    def run(x, seats, experts):
        rows = PushRows(jnp.int32(x.shape[0]), jnp.int32(0), seats, seats, experts)
        x = client.push(x, site, layer, rows)
        ys = [jnp.zeros((x.shape[0], width)) for width in SHAPES.sites[site].d_outs]
        return client.wait_add(ys, x, site, rows)

    ys, status = run(x, seats, experts)
    return [np.asarray(y) for y in ys], list(map(int, status))


def want(one, x, layer, output, expert=0):
    if (layer, output) not in one.weights:
        return np.float32(0)
    a, b = one.weights[layer, output]
    return 0.5 * (a[expert] @ x) @ b[expert]


def test_each_row_gets_its_own_tenants_delta(client, tenant):
    first, second = tenant(1), tenant(2)
    sit(client, 0, first)
    sit(client, 2, second)
    x = np.random.default_rng(0).standard_normal((5, 16), np.float32)
    owners = [2, 0, -1, 0, 2]
    for layer in range(2):
        ys, status = exchange(client, x, owners, layer=layer)
        assert status == [Status.ARRIVED] * 3
        for row, owner in enumerate(owners):
            for output, y in enumerate(ys):
                whose = (first, None, second)[owner]
                expected = 0 if owner < 0 else want(whose, x[row], layer, output)
                np.testing.assert_allclose(y[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["channel", "bell"])
def test_memory_that_could_shrink_is_refused_and_nothing_of_its_seat_stays_open(
    client, tenant, part
):
    """A tenant that made it smaller would end the engine by a signal."""
    before = open_files()
    given = tenant(7).server.join(0)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, os.fstat(getattr(given, part)).st_size)
    os.close(getattr(given, part))
    with pytest.raises(TransportError, match="seal"):
        client.sit(0, dataclasses.replace(given, **{part: loose}), lambda: None)
    descriptors = {str(number) for number in (given.channel, given.bell, given.life, loose)}
    assert not descriptors & {number for number, _ in open_files() - before}
    assert client.is_lost(0)


def test_rows_of_experts_get_their_experts_delta_and_others_are_refused(client, tenant):
    one = tenant(3, 3)
    sit(client, 1, one)
    x = np.random.default_rng(1).standard_normal((3, 32), np.float32)
    (y,), _ = exchange(client, x, [1, 1, 1], [2, 0, 1], site=1)
    for row, expert in enumerate((2, 0, 1)):
        np.testing.assert_allclose(y[row], want(one, x[row], 0, 2, expert), rtol=1e-5, atol=1e-5)
    (y,), status = exchange(client, x, [1, 1, 1], [2, 0, 3], site=1)
    assert status[1] == Status.REFUSED
    assert not y.any()


def test_an_engine_without_a_ring_leaves_nothing_behind(monkeypatch):
    """A socket cannot be mapped; a number that the library still had could take a ring."""
    real, made, pair = tenants.calls(), [], socket.socketpair()
    fds = [end.detach() for end in pair]

    def new(*given):
        made.append(real.client_new(*given))
        return made[-1]

    spied = SimpleNamespace(
        client_new=new, client_ring=real.client_ring, client_free=real.client_free
    )
    monkeypatch.setattr(tenants, "calls", lambda: spied)
    monkeypatch.setattr(tenants, "shared_memory", lambda _: fds[0])
    with pytest.raises(TransportError, match="cannot be mapped"):
        TenantClient(SHAPES, 3)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])
    os.close(fds[1])
    good = shared_memory(4096)
    assert not real.client_ring(made[0], good)
    os.close(good)


@pytest.mark.parametrize("shown", [True, False])
def test_a_sleeping_tenant_is_woken_with_and_without_the_ring(client, tenant, monkeypatch, shown):
    """Without a wake-up each answer would take until the end of a sleep, 50 ms."""
    if not shown:
        monkeypatch.setattr(tenants, "send_fds", lambda *_: None)
    rows = [tenant(9), tenant(10)]
    for number, one in enumerate(rows):
        sit(client, number, one)
    asleep = [mmap.mmap(one.server._server._bell, 4096) for one in rows]

    def sleeps(memory):  # on the ring, or on its bell: see csrc/channel.h
        return memory[192 if shown else 64] == 1 and memory[64 if shown else 192] == 0

    x = np.random.default_rng(3).standard_normal((2, 16), np.float32)
    waits = []
    # On a busy machine a wait takes as long as others compute: then more of them are looked at.
    while len(waits) < 10 or (sorted(waits)[len(waits) // 2] >= QUICK_S and len(waits) < 200):
        wait_until(lambda: all(map(sleeps, asleep)))
        before = client.stats().wait_seconds
        ys, status = exchange(client, x, [0, 1])
        waits.append(client.stats().wait_seconds - before)
        assert status == [Status.ARRIVED] * 3
        for row, one in enumerate(rows):
            np.testing.assert_allclose(ys[0][row], want(one, x[row], 0, 0), rtol=1e-5, atol=1e-5)
    assert sorted(waits)[len(waits) // 2] < QUICK_S


def test_a_tenant_that_does_not_answer_costs_others_no_bit_and_is_lost(client, tenant):
    x = np.random.default_rng(2).standard_normal((2, 16), np.float32)
    for limit_s in (0.05, 1.0, 20.0):  # on a busy machine the good one is late too
        sit(client, 0, tenant(4))
        sit(client, 1, tenant(5), runs=False)
        alone, _ = exchange(client, x, [0, -1])
        client.set_limit(limit_s)
        ys, status = exchange(client, x, [0, 1])
        client.set_limit(60.0)
        if status[0] == Status.ARRIVED:
            break
    assert status == [Status.ARRIVED, Status.TIMED_OUT, Status.ARRIVED]
    np.testing.assert_array_equal(ys[0][0], alone[0][0])
    assert not ys[0][1].any()
    assert client.lost() == (1, 2)
    assert exchange(client, x, [0, 1])[1][1] == Status.ABORTED  # at once, and not waited for


def test_a_tenants_end_is_noticed_and_its_seat_takes_a_newer_one_only(client, tenant):
    first = tenant(6)
    gone = sit(client, 0, first)
    old = client.last_epoch(0)
    first.server.stop()
    first.threads.pop().join(60)
    first.server.close()
    assert gone.wait(60)
    assert client.is_lost(0)
    copy = tenant(7)
    stale = copy.server.join(-1)
    replayed = Seat(stale.channel, stale.bell, stale.life, old)
    with pytest.raises(TransportError, match="a copy of an old one"):
        client.sit(0, replayed, lambda: None)
    again = tenant(6)
    sit(client, 0, again)
    assert not client.is_lost(0)


def test_memory_that_is_not_as_agreed_is_refused(client, tenant):
    one = tenant(8)
    seat = one.server.join(0)
    os.close(seat.channel)
    wrong = os.memfd_create("wrong")
    with pytest.raises(TransportError, match="seals"):
        client.sit(0, Seat(wrong, seat.bell, seat.life, seat.epoch), lambda: None)
    assert client.is_lost(0)


def test_without_a_compiler_the_isolation_says_what_to_do(monkeypatch):
    def fail():
        raise BuildError("no g++")

    monkeypatch.setattr(tenants, "rows_address", fail)
    with pytest.raises(
        NotImplementedError, match=r"\(no g\+\+\): install a C\+\+ compiler, or use"
    ):
        tenants.prepare()


def test_maps_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"maps must be \[2, 3\], got \(2, 2\)"):
        TenantServer(SHAPES, np.zeros((2, 2), MAP), None)
