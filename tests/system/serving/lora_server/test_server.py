"""A rank's loop over a transport that hands it requests, and adapters from other threads."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import lora_server_cases as cases
from support.cases.rank_loop import REFUSED, Running, load_within
from support.doubles.driver_double import cuda_double
from support.doubles.late_copier import LateCopier

from cuda_backend.vmm import CudaDriver
from lora_jax.memory.driver import DriverMemory
from serving.lora_server.host_parts import HostParts
from serving.lora_server.rank import ServerRank
from serving.lora_server.shared_reads import SharedReads
from serving.lora_server.spec import design
from serving.lora_server.transport import device_memory
from serving.lora_server.transport.base import PushRows, Request, Status
from serving.lora_server.transport.device_server import DeviceServer
from serving.lora_server.transport.shapes import GATE_UP


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cases.write_files(tmp_path_factory.mktemp("server"), 3)


@pytest.fixture(scope="module")
def made(files):
    return design(cases.make_spec(files[0], "ep2-pp2", num_adapters=2))


@pytest.fixture(scope="module")
def rank(made):
    """Rank 3: experts 2 and 3 of layer 1."""
    rank = ServerRank(made.catalogue, made.layout.shard(3), made.sizes, jnp.dtype("float32"))
    rank.warm_up()
    return rank


@pytest.fixture
def running(made, rank, files):
    loop = Running(made, rank, {name: Path(path) for name, path in files[1].items()})
    yield loop
    for number in rank.held:
        loop.server.unload(number, 9)
    loop.server.stop()
    loop.thread.join(30)
    assert not loop.thread.is_alive()
    assert loop.transport.closed
    assert loop.server.stats().compilations == 0
    rank.check_integrity()


def test_requests_of_held_adapters_are_answered(running, rank):
    running.load("a0", 2)
    running.load("a1", 1)
    gate, up = running.ask([2, 1, 2], [2, 3, 3])
    assert gate.shape == up.shape == (8, 48)
    assert gate[:3].any(axis=1).all()
    assert not gate[3:].any()
    assert (running.server.stats().answered, running.server.stats().refused) == (1, 0)


def test_an_adapter_that_comes_back_is_not_read_again(running, tmp_path):
    running.load("a0", 2)
    first = running.ask([2], [2])
    running.server.unload(2, 2)
    running.adapters["a0"] = tmp_path / "nothing"
    running.load("a0", 4, version=3)
    again = running.ask([4], [2], version=3)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_requests_of_several_instances_are_answered_in_turn(running):
    running.load("a0", 2)
    x, ids = np.ones((16, 32), np.float32), np.full(16, 2, np.int32)
    for count in (1, 2, 3, 4):
        request = Request(count, 1, 1, 1, GATE_UP, count, 1, x * count, ids, ids)
        running.transport.requests.put(request)
    sums = [running.transport.answers.get(timeout=60)[0][:1].sum() for _ in range(4)]
    assert sums == pytest.approx([sums[0] * count for count in (1, 2, 3, 4)], rel=1e-5)
    assert running.server.stats().answered == 4


@pytest.mark.parametrize(
    "request_",
    [
        {"numbers": [0], "experts": [2]},  # its place belongs to number 2 now
        {"numbers": [2, 1], "experts": [2, 2]},  # one of two is not held
        {"numbers": [2], "experts": [1]},  # another rank's expert
        {"numbers": [2], "experts": [4]},
        {"numbers": [2], "experts": [2], "layer": 0},  # another stage's layer
        {"numbers": [2], "experts": [2], "version": 8},  # the rank has missed a change
    ],
)
def test_what_is_not_the_ranks_to_answer_is_refused(running, request_):
    running.load("a0", 2)
    assert running.ask(**request_) is REFUSED
    assert running.ask([2], [2]) is not REFUSED
    assert running.server.stats().refused == 1


def test_an_unloaded_adapter_is_refused_and_its_place_is_free(running):
    running.load("a0", 0)
    running.server.unload(0, 2)
    assert running.ask([0], [2]) is REFUSED
    running.load("a2", 2, version=3)
    assert running.ask([2], [2], version=3) is not REFUSED


def test_loads_that_cannot_be_leave_the_loop_alive(running, files, tmp_path):
    with pytest.raises(ValueError, match="sha256"):
        running.load("a0", 0, digest="0" * 64)
    with pytest.raises(ValueError, match="cannot read"):
        running.server.load(0, tmp_path / "nowhere", "0" * 64, 1)
    running.load("a0", 0)
    with pytest.raises(ValueError, match="place of adapter number 2"):
        running.load("a1", 2)
    running.load("a1", 1)
    with pytest.raises(ValueError, match="place"):
        running.load("a2", 3)
    assert running.ask([0, 1], [2, 3]) is not REFUSED


class RefusingCopier(LateCopier):
    refuses = False

    def begin_write_into(self, array, offset, data):
        if self.refuses:
            raise OSError("the device took no copy")
        super().begin_write_into(array, offset, data)


def test_a_copy_that_fails_is_told_and_the_loop_lives(made, files):
    copier = RefusingCopier()
    how = made.catalogue, made.layout.shard(3), made.sizes, jnp.dtype("float32")
    rank = ServerRank(*how, copier=copier)
    rank.warm_up()
    loop = Running(made, rank, {name: Path(path) for name, path in files[1].items()})
    load_within(30, loop, "a0", 0)
    copier.refuses = True
    with pytest.raises(ValueError, match="could not be loaded: the device took no copy"):
        loop.load("a1", 1)
    copier.refuses = False
    assert loop.ask([1], [3]) is REFUSED
    load_within(30, loop, "a1", 1)
    assert loop.ask([0, 1], [2, 3]) is not REFUSED
    loop.server.stop()
    loop.thread.join(30)
    assert loop.server.stats().compilations == 0


def test_requests_are_answered_while_an_adapter_loads(running):
    running.load("a0", 0)
    loader = threading.Thread(target=running.load, args=("a1", 1, 2))
    loader.start()
    for _ in range(20):
        assert running.ask([0], [3]) is not REFUSED
    loader.join()
    assert running.ask([1], [3], version=2) is not REFUSED


def test_a_layer_on_its_way_is_waited_for_and_those_before_it_are_not(files, monkeypatch):
    both = design(cases.make_spec(files[0], "ep1-pp1", num_adapters=2))
    rank = ServerRank(both.catalogue, both.layout.shard(0), both.sizes, jnp.dtype("float32"))
    rank.warm_up()
    advance, must_wait, waited = rank.advance, rank.must_wait, threading.Event()

    def slow(max_chunks):
        """One chunk, and after the first layer only for who waits."""
        return None if rank.held and not waited.is_set() else advance(1)

    def noted(numbers, layer):
        if must_wait(numbers, layer):
            waited.set()
            return True
        return False

    monkeypatch.setattr(rank, "advance", slow)
    monkeypatch.setattr(rank, "must_wait", noted)
    loop = Running(both, rank, {name: Path(path) for name, path in files[1].items()})
    loop.load("a0", 0)
    assert rank.is_loading
    first = loop.ask([0], [1], layer=0)
    assert not waited.is_set()
    second = loop.ask([0], [1], layer=1)
    assert waited.is_set()
    for deltas in (first, second):
        assert all(delta[0].any() for delta in deltas)
    loop.server.stop()
    loop.thread.join(30)
    for layer, want in enumerate((first, second)):
        x, slots = np.ones((8, 32), np.float32), np.full(8, -1, np.int32)
        slots[0] = rank.slots_of(np.zeros(1, np.int32), 8)[0]
        found = rank.deltas(GATE_UP, layer, x, slots, np.ones(8, np.int32))
        np.testing.assert_array_equal(np.asarray(found[0])[0], want[0][0])


def test_a_part_that_was_fetched_is_loaded_without_its_files_until_it_is_forgotten(
    running, tmp_path
):
    server, digest = running.server, running.digests["a0"]
    server._parts = HostParts(0)  # the host keeps nothing for the next time
    assert server.fetch(running.adapters["a0"], digest).read_s > 0
    assert server.load(0, tmp_path / "nowhere", digest, 1).read_s == 0
    server.unload(0, 2)
    server.forget(digest)
    server.forget(digest)
    with pytest.raises(ValueError, match="cannot read"):
        server.load(1, tmp_path / "nowhere", digest, 3)


def test_a_fetch_that_is_forgotten_before_it_ends_leaves_nothing_held(running, monkeypatch):
    server, digest, read = running.server, running.digests["a0"], running.server._read

    def given_up(folder, digest):
        server.forget(digest)
        return read(folder, digest)

    server._parts = HostParts(0)
    monkeypatch.setattr(server, "_read", given_up)
    assert server.fetch(running.adapters["a0"], digest).read_s > 0
    assert not server._parts.any_held
    assert server._parts.num_bytes == 0


def test_an_adapter_that_is_asked_for_again_while_it_is_read_is_read_once(running, monkeypatch):
    """As after a caller that has given a hung disk up."""
    server, digest, read = running.server, running.digests["a0"], running.server._read
    begun, free, times = threading.Event(), threading.Event(), []

    def hung(folder, digest):
        times.append(folder)
        begun.set()
        assert free.wait(30)
        return read(folder, digest)

    monkeypatch.setattr(server, "_read", hung)
    server._reads = SharedReads(0.0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.fetch, running.adapters["a0"], digest)
        assert begun.wait(30)
        with pytest.raises(ValueError, match="look at the disk of its host"):
            server.fetch(running.adapters["a0"], digest)
        server.forget(digest)
        free.set()
        assert first.result(30).read_s > 0
    assert len(times) == 1
    assert not server._parts.any_held


def test_parts_that_are_fetched_take_no_bytes_beside_the_bound(running):
    server, digests = running.server, running.digests
    server._parts = HostParts(1)
    for name in ("a0", "a1"):
        assert server.fetch(running.adapters[name], digests[name]).read_s > 0
    assert server._parts.held(digests["a0"]) is not None
    assert server._parts.held(digests["a1"]) is None
    assert server.load(0, running.adapters["a0"], digests["a0"], 1).read_s == 0
    server.forget(digests["a0"])
    assert server.load(1, running.adapters["a1"], digests["a1"], 2).read_s > 0
    assert server._parts.num_bytes == 0


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_adapters_that_the_host_copies_as_on_a_gpu_have_the_same_deltas(
    made, running, files, tmp_path
):
    for name, number in (("a0", 0), ("a1", 1)):
        running.load(name, number)
    want = running.ask([0, 1, 0], [2, 3, 3])
    copier = DriverMemory(CudaDriver(0, cuda_double(tmp_path).path))
    how = made.catalogue, made.layout.shard(3), made.sizes, jnp.dtype("float32")
    rank = ServerRank(*how, copier=copier)
    rank.warm_up()
    loop = Running(made, rank, running.adapters)
    for name, number in (("a0", 0), ("a1", 1)):
        load_within(30, loop, name, number)
    got = loop.ask([0, 1, 0], [2, 3, 3])
    loop.server.stop()
    loop.thread.join(30)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert loop.server.stats().compilations == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_command_that_ends_the_loop_fails_and_so_do_later_ones(made, rank, files, monkeypatch):
    loop = Running(made, rank, {name: Path(path) for name, path in files[1].items()})

    told = []

    def broken(number, part):
        raise RuntimeError("the device is gone")

    def load(number):
        with pytest.raises(ConnectionError) as caught:
            loop.load("a0", number)
        told.append(str(caught.value))

    monkeypatch.setattr(rank, "start_load", broken)
    for number in range(2):
        loader = threading.Thread(target=load, args=(number,), daemon=True)
        loader.start()
        loader.join(30)
        loop.thread.join(30)
    assert told == ["The rank of the LoRA Server has stopped."] * 2
    assert loop.transport.closed


def test_a_load_may_begin_before_the_thread_that_asked_goes_on(made, rank, files):
    loop = Running(made, rank, {name: Path(path) for name, path in files[1].items()})
    put, ran = loop.server._commands.put, threading.Event()

    class Commands:
        """The queue, whose `put` returns when the loop has run the command."""

        get_nowait = loop.server._commands.get_nowait

        def put(self, queued):
            command, done = queued

            def run():
                try:
                    return command()
                finally:
                    ran.set()

            put((run, done))
            assert ran.wait(30)

    loop.server._commands = Commands()
    load_within(30, loop, "a0", 0)
    loop.server.unload(0, 2)
    loop.server.stop()
    loop.thread.join(30)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_layer_on_its_way_holds_no_other_instance_up(files, gpus, monkeypatch):
    """Programs go on answering while the host keeps the message that waits."""
    made = design(cases.make_spec(files[0], "ep2-pp1", num_adapters=2))
    rank = ServerRank(made.catalogue, made.layout.shard(1), made.sizes, jnp.dtype("float32"))
    rank.warm_up()
    goes_on, advance = threading.Event(), rank.advance

    def slow(max_chunks):
        """One chunk, and of a1 no more than its first layer for now."""
        return None if 1 in rank.held and not goes_on.is_set() else advance(1)

    monkeypatch.setattr(rank, "advance", slow)
    transport = DeviceServer(made.terms.shapes, gpus.device(1), pull=False)
    loop = Running(made, rank, {name: Path(path) for name, path in files[1].items()}, transport)
    loop.load("a0", 0)
    loop.load("a1", 1)
    assert rank.is_loading
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(ask_over_device, transport, gpus, 1, [(1, 0), (1, 1)])
        others = ask_over_device(transport, gpus, 2, [(0, 0), (0, 1), (0, 1)])
        assert not late.done()
        goes_on.set()
        assert (late.result(), others) == ([Status.ARRIVED] * 2, [Status.ARRIVED] * 3)
    stats = loop.server.stats()
    assert (stats.answered, stats.refused, stats.compilations) == (5, 0, 0)
    loop.server.stop()
    loop.thread.join(30)


def ask_over_device(transport, gpus, device, asked):
    """Return the statuses of exchanges of an instance, each of one row of (adapter, layer)."""
    client = device_memory.open_local_client([transport], gpus.device(0), separate_stream=False)
    client.set_limit(60.0)
    spec, statuses = transport.shapes.sites[GATE_UP], []
    with jax.default_device(jax.devices()[device]):
        for number, layer in asked:
            ids = [jnp.asarray([one], jnp.int32) for one in (0, number, 2)]
            rows = PushRows(jnp.int32(1), jnp.int32(0), *ids)
            x = client.push(jnp.ones((1, spec.d_in)), GATE_UP, layer, rows)
            ys = tuple(jnp.zeros((1, width)) for width in spec.d_outs)
            statuses.append(int(client.wait_add(ys, x, GATE_UP, rows)[1][0]))
    client.close()
    return statuses


def test_commands_after_the_end_are_told_so(made, rank, files):
    loop = Running(made, rank, {name: Path(path) for name, path in files[1].items()})
    loop.server.stop()
    loop.thread.join(30)
    for command in (lambda: loop.load("a0", 0), lambda: loop.server.unload(0, 1)):
        with pytest.raises(ConnectionError, match="has stopped"):
            command()
