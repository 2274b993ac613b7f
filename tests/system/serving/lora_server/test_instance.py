"""An engine's end of a LoRA Server, over a transport and leases that do as they are told."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.cases import lora_server_cases as cases
from support.waiting import wait_until

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, ModuleReport, SiteWeights
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.api.config import EngineConfig
from serving.lora_server import instance
from serving.lora_server.client import LOCAL, ServerLink
from serving.lora_server.coordinator import Lease
from serving.lora_server.instance import LOST, InstanceSide, ServerAccess, connect
from serving.lora_server.shards import ShardLayout


class Transport:
    def __init__(self):
        self.servers, self.away, self.limit, self.closed, self.rejoins = 2, set(), None, False, 0

    def lost(self):
        return tuple(sorted(self.away))

    def rejoin(self):
        self.rejoins += 1
        return self.lost()

    def set_limit(self, seconds):
        self.limit = seconds

    def close(self):
        self.closed = True


class Source:
    def __init__(self):
        self.asked, self.released, self.left = [], [], False

    def lease(self, name, digest, folder):
        self.asked.append((name, digest, folder))
        if digest == "bad":
            raise ValueError("broken files")
        return Lease(10 + len(self.asked), len(self.asked))

    def release(self, name, digest):
        self.released.append(digest)

    def leave(self, name):
        self.left = True


def entry(digest, *modules):
    one = ModuleReport((0,), (2,), (1.0,))
    report = SimpleNamespace(modules=dict.fromkeys(modules or ("experts.up_proj",), one))
    return SimpleNamespace(digest=digest, report=report, folder=f"folder of {digest}")


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def side(source):
    layout = ShardLayout(ServerLayout(AdapterShape(1, 1, 2, 1), 2, 1), (0,))
    link, before = ServerLink(layout, Transport()), {*threading.enumerate()}
    made = InstanceSide(link, source, "me", num_slots=3)
    yield made
    made.check_integrity()
    made.close()
    assert source.left
    assert link.client.closed
    names = {thread.name for thread in {*threading.enumerate()} - before}
    assert not {name for name in names if name.startswith("lora-server")}


def test_an_adapter_is_ready_when_it_is_leased(side, source):
    woken = threading.Event()
    side.wake = woken.set
    side.retain(entry("d"))
    assert woken.wait(30)
    wait_until(lambda: side.is_ready("d"))
    assert source.asked == [("me", "d", "folder of d")]
    side.bind(2, "d")
    numbers, version = side.take_table()
    np.testing.assert_array_equal(numbers, [LOCAL, LOCAL, 11])
    assert version == 1
    assert side.take_table() is None
    side.bind(2, "d")
    assert side.take_table() is None  # nothing has changed
    side.drop("d", 0)
    side.collect(0)


def test_a_lease_stays_until_no_step_can_have_rows_of_it(side, source):
    side.retain(entry("d"))
    wait_until(lambda: side.is_ready("d"))
    side.drop("d", dispatched=5)
    assert side.is_busy
    side.collect(read=4)
    assert source.released == []
    side.collect(read=5)
    wait_until(lambda: source.released == ["d"])
    assert not side.is_busy


def test_what_needs_no_server_is_ready_at_once(side, source):
    one = entry("a", "q_proj")
    side.retain(one)
    assert side.is_ready(one.digest)
    side.bind(0, one.digest)
    assert side.take_table() is None
    side.drop(one.digest, 0)
    assert source.asked == []


def test_a_slot_that_changes_hands_loses_its_number(side):
    side.retain(entry("d"))
    wait_until(lambda: side.is_ready("d"))
    side.bind(1, "d")
    side.take_table()
    side.bind(1, "attention only")
    numbers, version = side.take_table()
    np.testing.assert_array_equal(numbers, [LOCAL] * 3)
    assert version == 1
    side.drop("d", 0)
    side.collect(0)


def test_a_failed_step_harms_the_adapters_of_live_requests(side):
    side.retain(entry("d"))
    wait_until(lambda: side.is_ready("d"))
    assert side.affected_by(np.zeros(2, np.int32)) == frozenset()
    assert side.affected_by(np.asarray([0, 1])) == {"d"}
    side.drop("d", 0)
    side.collect(0)
    assert side.affected_by(np.asarray([0, 1])) == frozenset()


def test_a_refusal_asks_for_the_leases_again(side, source):
    side.retain(entry("d"))
    wait_until(lambda: side.is_ready("d"))
    side.affected_by(np.asarray([3, 0]))
    wait_until(lambda: len(source.asked) == 2 and side.is_ready("d"))
    side.drop("d", 0)
    side.collect(0)


def test_requests_that_need_a_lost_server_end(side):
    side.retain(entry("d"))
    assert side.take_failures() == []
    side.link.client.away = {1}
    assert side.is_busy
    assert side.take_failures() == [("d", LOST)]
    wait_until(lambda: side.link.client.rejoins > 0)
    side.link.client.away = set()
    assert side.take_failures() == []
    side.drop("d", 0)
    side.collect(0)


def test_refused_files_end_the_requests(side):
    side.retain(entry("bad"))
    wait_until(lambda: side.is_busy)
    assert side.take_failures() == [("bad", "broken files")]
    side.drop("bad", 0)
    side.collect(0)


def test_an_instance_keeps_what_the_server_does_not_hold(side):
    modules = {"experts.up_proj": ModuleReport((0,), (2,), (1.0,))}
    report = AdapterReport(AdapterKind.LORA, "f", "d", {}, 0, 99, modules, 2, 0, None, None)
    site = SiteWeights(np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 5), np.float32), 1.0)
    weights = AdapterWeights({("q_proj", 0): site, ("experts.up_proj", 0): site}, report)
    kept = side.keep(weights)
    assert set(kept.sites) == {("q_proj", 0)}
    side.num_local = 1
    both = side.keep(weights)
    assert set(both.sites) == {("q_proj", 0)}
    assert set(both.whole.sites) == set(weights.sites)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_batched_tokens": 9}, "lower max_num_batched_tokens to 8"),
        ({"max_lora_rank": 9}, "same max_lora_rank"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anybody_is_called(tmp_path, changes, message):
    model, _ = cases.write_files(tmp_path, 0)
    spec = cases.make_spec(model, "ep2-pp1")

    def nobody(terms):
        raise AssertionError("connected")

    access = ServerAccess(spec, "me", Source(), nobody)
    config = EngineConfig(model=model, **cases.ENGINE | changes)
    with pytest.raises(ValueError, match=message):
        connect(access, config, "float32")


def test_the_instance_says_what_it_runs_itself(tmp_path):
    model, _ = cases.write_files(tmp_path / "mine", 0)
    other, _ = cases.write_files(tmp_path / "other", 0)
    said, transport = [], Transport()
    access = ServerAccess(
        cases.make_spec(other, "ep2-pp1", dtype="bfloat16"),
        "me",
        Source(),
        lambda terms, device: said.append(terms) or transport,
        wait_s=0.25,
    )
    side = connect(access, EngineConfig(model=model, **cases.ENGINE), "float32")
    side.close()
    assert said[0].shapes.dtype == "float32"
    assert transport.limit == 0.25


def test_several_devices_have_a_client_each_or_none_at_all():
    """One that cannot connect closes those that could."""
    closed, spec = [], SimpleNamespace()

    def connect_device(terms, device):
        if device == 2:
            raise ConnectionError("device 2 has no peer")
        return SimpleNamespace(close=lambda: closed.append(device))

    access = ServerAccess(spec, "me", Source(), connect_device)
    assert instance._client(access, "terms", 1) is not None
    with pytest.raises(ConnectionError, match="device 2 has no peer"):
        instance._client(access, "terms", 3)
    assert closed == [0, 1]
