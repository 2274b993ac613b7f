"""A rank's programs answer as its host does, over emulated GPUs."""

import copy
import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import lora_server_cases as cases
from support.cases.transport_cases import bits

from lora_jax.adapters import reader
from serving.lora_server.device_loop import DeviceLoop, Report
from serving.lora_server.rank import ServerRank
from serving.lora_server.shards import shard_part
from serving.lora_server.spec import design
from serving.lora_server.transport import device_memory
from serving.lora_server.transport.base import PushRows, Status
from serving.lora_server.transport.device_server import DeviceServer
from serving.lora_server.transport.shapes import DOWN, GATE_UP
from serving.runtime.compile_counter import CompileCounter

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
NUM_ROWS = 11


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device_loop")
    model, adapters = cases.write_files(folder, 2)
    found = design(cases.make_spec(model, "ep2-pp1", num_adapters=2))
    return found, [reader.read(Path(path), found.catalogue) for path in adapters.values()]


@pytest.fixture
def rank(made):
    """Experts 2 and 3 of both layers, and adapter a0 under number 2."""
    found, adapters = made
    held = ServerRank(found.catalogue, found.layout.shard(1), found.sizes, jnp.dtype("float32"))
    held.start_load(2, shard_part(adapters[0], held.shard))
    while held.is_loading:
        held.advance(8)
    return held


class Exchanges:
    """A client of one rank, and the rank's loop, in turns on one thread."""

    def __init__(self, made, rank, gpus):
        self._shapes = made.terms.shapes
        self.server = DeviceServer(self._shapes, gpus.device(1), pull=False)
        self.loop = DeviceLoop(rank, made.layout.moe_layers, self.server)
        endpoints = gpus.device(0)
        self.client = device_memory.open_local_client(
            [self.server], endpoints, separate_stream=False
        )
        self.client.set_limit(60.0)

    def push(self, site, layer, numbers, experts, version=0):
        spec, count = self._shapes.sites[site], len(numbers)
        self.x = np.random.default_rng(count).standard_normal((count, spec.d_in), np.float32)
        ids = [jnp.asarray(v, jnp.int32) for v in ([0] * count, numbers, experts)]
        self.rows = PushRows(jnp.int32(count), jnp.int32(version), *ids)
        self.x = jax.block_until_ready(
            self.client.push(jnp.asarray(self.x), site, layer, self.rows)
        )
        self.site = site

    def served(self, version=0, seconds=0.02, answers=8):
        """Return what the loop says of the messages that are there, when it has ended."""
        return self.loop.turn(version, seconds, answers) + self.loop.drain()

    def wait(self):
        widths = self._shapes.sites[self.site].d_outs
        ys = tuple(jnp.zeros((len(self.x), width), jnp.float32) for width in widths)
        deltas, status = self.client.wait_add(ys, self.x, self.site, self.rows)
        return [np.asarray(delta) for delta in deltas], Status(int(status[0]))

    def close(self):
        self.client.close()
        self.server.close()


@pytest.fixture
def exchanges(made, rank, gpus):
    found = Exchanges(made[0], rank, gpus)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("site", "layer"),
    [
        pytest.param(*case, marks=() if case in ((GATE_UP, 0), (DOWN, 1)) else pytest.mark.long)
        for case in itertools.product((GATE_UP, DOWN), range(2))
    ],
)
def test_answers_have_the_bits_of_the_hosts(exchanges, rank, site, layer):
    for count in (1, 8, NUM_ROWS):
        numbers, experts = [2] * count, sorted([2, 3] * count)[:count]
        exchanges.push(site, layer, numbers, experts)
        assert exchanges.served() == Report(1)
        got, status = exchanges.wait()
        assert status == Status.ARRIVED
        bucket = rank.bucket(count)
        x = np.zeros((bucket, rank.width_in(site)), np.float32)
        x[:count] = exchanges.x
        slots = rank.slots_of(np.asarray(numbers), bucket)
        wanted = rank.deltas(site, layer, x, slots, np.resize(np.int32(experts), bucket))
        assert [bits(delta) for delta in got] == [bits(w[:count]) for w in wanted]


@pytest.mark.parametrize(
    ("numbers", "experts", "version"),
    [([2, 4], [2, 3], 0), ([2, 3], [2, 3], 0), ([2, 2], [1, 2], 0), ([2, 2], [2, 3], 9)],
    ids=["gone from its place", "never held", "another rank's expert", "a table to come"],
)
def test_what_is_not_the_ranks_to_give_is_left_to_the_host(exchanges, numbers, experts, version):
    """A program's table may be older than what the host knows by now."""
    exchanges.push(GATE_UP, 0, numbers, experts, version)
    report = exchanges.served(version=8)
    assert (report.answered, len(report.left)) == (0, 1)
    request = exchanges.server.left(report.left[0])
    assert (request.adapters.tolist(), request.table_version) == (numbers, version)
    assert exchanges.server.refuse(request)
    deltas, status = exchanges.wait()
    assert status == Status.REFUSED
    assert not any(delta.any() for delta in deltas)
    exchanges.push(DOWN, 1, [2, 2], [2, 3], 8)
    assert exchanges.served(version=8) == Report(1)
    assert exchanges.wait()[1] == Status.ARRIVED


def test_a_layer_on_its_way_is_left_to_the_host(exchanges, rank, made):
    part = shard_part(made[1][1], rank.shard)
    rank.start_load(3, part)
    while rank.advance(1) is None:
        pass
    assert rank.is_loading
    exchanges.push(GATE_UP, 0, [3, 2], [2, 3])
    assert exchanges.served() == Report(1)
    assert exchanges.wait()[1] == Status.ARRIVED
    exchanges.push(GATE_UP, 1, [3, 2], [2, 3])
    report = exchanges.served()
    assert (report.answered, len(report.left)) == (0, 1)
    request = exchanges.server.left(report.left[0])
    assert request is not None
    assert bits(request.x) == bits(exchanges.x)
    assert request.adapters.tolist() == [3, 2]
    while rank.is_loading:
        rank.advance(8)
    slots = rank.slots_of(request.adapters, 8)
    deltas = rank.deltas(GATE_UP, 1, request.padded(8)[0], slots, request.padded(8)[2])
    assert exchanges.server.respond(request, [np.asarray(delta) for delta in deltas])
    got, status = exchanges.wait()
    assert status == Status.ARRIVED
    assert all(delta.any(axis=1).all() for delta in got)


def test_instances_at_other_layers_share_a_launch(exchanges, rank, gpus):
    """Rows of each have the bits that they have alone; what one may not ask harms no other."""
    others = [copy.copy(exchanges) for _ in range(2)]
    for other in others:
        other.client = device_memory.open_local_client(
            [exchanges.server], gpus.device(0), separate_stream=False
        )
        other.client.set_limit(60.0)
    pushed = [(exchanges, 0, [2] * 3, [2, 3, 3]), (others[0], 1, [2, 2], [2, 3])]
    for one, *asked in pushed:
        one.push(GATE_UP, *asked)
    others[1].push(GATE_UP, 1, [2, 3], [2, 3])  # nobody holds 3
    report = exchanges.served()
    assert (report.answered, [line[1:4] for line in report.left]) == (2, [(GATE_UP, 1, 2)])
    for one, layer, numbers, experts in pushed:
        got, status = one.wait()
        assert status == Status.ARRIVED
        x = np.zeros((8, rank.width_in(GATE_UP)), np.float32)
        x[: len(numbers)] = one.x
        slots = rank.slots_of(np.asarray(numbers), 8)
        wanted = rank.deltas(GATE_UP, layer, x, slots, np.resize(np.int32(experts), 8))
        assert [bits(delta) for delta in got] == [bits(w[: len(numbers)]) for w in wanted]
    assert exchanges.server.refuse(exchanges.server.left(report.left[0]))
    assert others[1].wait()[1] == Status.REFUSED
    for other in others:
        other.client.close()


@pytest.mark.parametrize("answers", [1, pytest.param(64, marks=pytest.mark.long)])
def test_instances_that_come_at_any_moment_are_all_answered(exchanges, rank, gpus, answers):
    """Each has the bits that it has alone, whatever the sites and layers of the others."""
    others = [copy.copy(exchanges) for _ in range(3)]
    sent = [(site, layer) for layer in range(2) for site in (GATE_UP, DOWN)] * 2

    def ask(number):
        other, experts = others[number], sorted([2, 3] * 4)[: 3 + number]
        endpoints, got = gpus.device(0), []
        other.client = device_memory.open_local_client(
            [exchanges.server], endpoints, separate_stream=False
        )
        other.client.set_limit(60.0)
        with jax.default_device(jax.devices()[1 + number]):
            for site, layer in sent:
                other.push(site, layer, [2] * len(experts), experts)
                got.append((other.x, *other.wait()))
        other.client.close()
        return experts, got

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, number) for number in range(3)]
        report = Report(0)
        while not all(one.done() for one in asked):
            report += exchanges.loop.turn(0, 0.005, answers)
    assert report + exchanges.loop.drain() == Report(3 * len(sent))
    for experts, got in (one.result() for one in asked):
        for (site, layer), (sent_x, deltas, status) in zip(sent, got, strict=True):
            assert status == Status.ARRIVED
            x = np.zeros((8, rank.width_in(site)), np.float32)
            x[: len(experts)] = sent_x
            slots = rank.slots_of(np.full(len(experts), 2), 8)
            wanted = rank.deltas(site, layer, x, slots, np.resize(np.int32(experts), 8))
            assert [bits(delta) for delta in deltas] == [bits(w[: len(experts)]) for w in wanted]


def test_an_interrupted_program_ends_without_a_message(exchanges):
    """However long it might wait, and no look is taken until programs may go on."""
    loop = exchanges.loop
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(loop.turn, 0, 600.0, 8)
        loop.interrupt()
        assert turn.result() == Report(0)
    exchanges.push(GATE_UP, 0, [2], [2])
    assert exchanges.served(seconds=600.0) == Report(0)
    loop.resume()
    assert exchanges.served() == Report(1)
    assert exchanges.wait()[1] == Status.ARRIVED


def test_nothing_is_compiled_once_it_serves(exchanges):
    """Whatever became of the program before."""
    counter, loop = CompileCounter(), exchanges.loop
    counter.watch_this_thread()
    loop.interrupt()
    loop.turn(0, 0.001, 8)
    loop.resume()
    loop.turn(0, 0.001, 8)
    loop.turn(1, 0.001, 8)  # with another table
    assert loop.drain() == Report(0)
    counter.close()
    assert counter.count == 0


def test_a_table_of_too_many_slots_takes_one_message_at_a_time(exchanges, rank, made, monkeypatch):
    assert rank.most_messages > 1
    monkeypatch.setattr("serving.lora_server.rank._MOST_SLOTS", 1)
    assert rank.most_messages == 1
    exchanges.loop = DeviceLoop(rank, made[0].layout.moe_layers, exchanges.server)
    exchanges.push(DOWN, 1, [2, 2], [2, 3])
    assert exchanges.served() == Report(1)
    assert exchanges.wait()[1] == Status.ARRIVED


def test_nothing_comes_of_no_message(exchanges):
    assert exchanges.served(seconds=0.0) == Report(0)
