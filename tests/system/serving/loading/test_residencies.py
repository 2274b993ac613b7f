"""All kinds behind one residency: slots follow each other, everything finds its own."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from support.cases import adapter_cases
from support.doubles.late_copier import LateCopier
from support.doubles.residency_doubles import (
    ESFT,
    LAST,
    LORA,
    OTHER,
    OneStep,
    Room,
    Server,
    Slots,
    device,
    entry,
)
from support.drivers.registry_changes import follow

from lora_jax.adapters.kinds import AdapterKind
from serving.loading.adapter_loader import AdapterLoader, ResidencySnapshot
from serving.loading.esft_residency import EsftResidency
from serving.loading.lora_residency import LoraResidency
from serving.loading.pair_residency import PairResidency
from serving.loading.residencies import Residencies, make_residencies
from serving.loading.server_residency import ServerResidency
from serving.loading.stand_in_residency import StandInResidency
from serving.lora_server.instance import InstanceSide
from serving.lora_server.shared_side import SharedSide


class Case:
    def __init__(self, server=None):
        self.room, self.device = Room(), device()
        loader = AdapterLoader(Slots(2), OneStep)
        lora = LoraResidency(loader) if server is None else ServerResidency(loader, server)
        esft = EsftResidency(AdapterLoader(Slots(1), OneStep), self.room, 2)
        self.all = Residencies([lora, esft])

    def advance(self):
        return self.all.advance(self.device, 10, 4, 3)


def test_loads_wait_where_the_next_step_is_due():
    """More of them than a look apart would leave the device without a step meanwhile."""
    loads = Residencies([LoraResidency(AdapterLoader(Slots(6), OneStep, at_once=6))])
    tables, looks = device(), []
    for number in range(6):
        loads.retain(one := entry(f"a{number}", AdapterKind.LORA))
        assert loads.acquire(one.digest) is None

    def runs():
        looks.append(loads.snapshot.swaps)
        return len(looks) < 3

    loads.advance(tables, 8, 4, 3, lambda: False)
    assert loads.snapshot.swaps == 1
    loads.advance(tables, 8, 4, 3, runs)
    assert looks == [2, 3, 4]
    assert loads._all[0]._loader.runs is not runs  # whose step's results would stay
    loads.advance(tables, 8, 4, 3)
    assert loads.snapshot.swaps == 6
    assert not loads.is_busy


def test_slots_of_esft_follow_those_of_lora():
    case = Case()
    for one in (ESFT, LORA, OTHER):
        case.all.retain(one)
        assert case.all.acquire(one.digest) is None
        assert case.all.is_loading(one.digest)
    assert case.all.in_use() == {LORA.digest, OTHER.digest, ESFT.digest}
    assert case.all.is_busy
    assert case.advance() == []
    assert case.device.slots == (LORA.digest, OTHER.digest)
    assert case.device.reroute_tables == (ESFT.digest,)
    assert case.room.told == [(4, 3)]
    assert [case.all.acquire(one.digest) for one in (LORA, OTHER, ESFT)] == [0, 1, 2]
    snapshot = case.all.snapshot
    assert snapshot.resident == {LORA.digest, OTHER.digest, ESFT.digest}
    assert (snapshot.slots_used, snapshot.slots_total, snapshot.swaps) == (3, 3, 3)
    assert (snapshot.bytes_used, snapshot.expert_page_bytes) == (30, 77)
    with pytest.raises(AssertionError, match="in use"):
        case.all.check_integrity()
    for one in (LORA, OTHER, ESFT):
        case.all.release(one.digest)
        case.all.drop(one.digest)
    assert not case.all.snapshot.resident
    case.all.check_integrity()


def test_each_kind_follows_its_own_part_of_the_registry():
    case = Case()
    follow(case.all, [LORA, ESFT, LAST])
    case.advance()
    assert case.all.snapshot.resident == {LORA.digest, ESFT.digest}
    follow(case.all, [LORA, LAST])
    assert case.all.snapshot.resident == {LORA.digest}
    case.advance()
    assert case.all.snapshot.resident == {LORA.digest, LAST.digest}


def test_each_kind_has_a_pool_and_what_stays_has_none():
    case, pinned = Case(), entry("p", AdapterKind.LORA, pinned=True)
    follow(case.all, [pinned, LORA, ESFT])
    pools = [case.all.pool_of(one.digest) for one in (pinned, LORA, ESFT)]
    assert pools == [None, "lora", "esft"]


def test_the_server_is_one_kinds_business():
    server = Server()
    case = Case(server)
    server.affected, server.failures = frozenset({"d"}), [("d", "lost")]
    case.all.call_on_news(print)
    assert server.wake is print
    assert case.all.affected_by([1]) == {"d"}
    assert case.all.affected_by(None) == case.all.servable_here(["d"]) == frozenset()
    assert case.advance() == [("d", "lost")]
    server.table = ("numbers", 5)
    case.all.prepare(case.device, 0)
    assert case.device.told == [("numbers", 5)]
    case.all.rest()
    case.all.close()
    assert (server.closed, case.room.closed, case.room.trimmed) == (1, 1, 1)


def test_the_registry_finds_the_residency_by_the_weights():
    case = Case()
    for one in (LORA, ESFT):
        case.all.check_fits(one.weights)
    assert case.all.keep(ESFT.weights) is case.all.keep_composed(ESFT.weights) is ESFT.weights
    weights = adapter_cases.weights(adapter_cases.llama(), 4, seed=1)
    assert case.all.keep(weights) is weights
    only_lora = Residencies([LoraResidency(AdapterLoader(Slots(2), OneStep))])
    assert only_lora.of(AdapterKind.ESFT) is None
    with pytest.raises(
        ValueError, match="max_esft_adapters is 0, or the log of its start says why"
    ):
        only_lora.check_fits(ESFT.weights)


def test_an_engine_without_adapters_has_no_residency():
    none = Residencies()
    follow(none, [])
    none.prepare(device(), 0)
    assert none.advance(device(), 1, 0, 0) == []
    assert (none.is_busy, none.in_use(), none.snapshot) == (False, frozenset(), ResidencySnapshot())
    none.rest()
    none.close()
    none.check_integrity()
    with pytest.raises(KeyError, match="no residency knows"):
        none.acquire(LORA.digest)
    with pytest.raises(ValueError, match="max_loras"):
        none.check_fits(LORA.weights)


def test_matrices_are_pinned_for_the_copier_or_cut_for_several_devices():
    weights, cut = (adapter_cases.weights(adapter_cases.llama(), 4, seed=seed) for seed in (1, 2))
    copier, told = LateCopier(), {"on_loaded": lambda seconds: None}
    pinning = make_residencies(Slots(1), None, None, copier=copier, **told)
    kept = pinning.keep(weights)
    assert copier.log == ["pin"]  # the block that all matrices lie in
    for one, other in zip(kept.matrices(), weights.matrices(), strict=True):
        np.testing.assert_array_equal(one, other)
    cutting = make_residencies(Slots(1), None, None, host_form=lambda given: cut, **told)
    assert cutting.keep(weights) is cut


@pytest.mark.parametrize(
    ("side", "residency"),
    [
        (None, LoraResidency),
        (Mock(spec=InstanceSide, num_local=0), ServerResidency),
        (Mock(spec=InstanceSide, num_local=2), StandInResidency),
        (Mock(spec=SharedSide), ServerResidency),
    ],
    ids=["alone", "server", "server and slots of its own", "process of all adapters"],
)
@pytest.mark.parametrize("with_esft", [False, True])
def test_what_is_there_decides_on_the_residencies(side, residency, with_esft):
    esft = SimpleNamespace(room=Room()) if with_esft else None
    if esft is not None:
        esft.room.allocator, esft.room.job = Slots(1), OneStep
    took = []
    made = make_residencies(Slots(3), esft, side, on_loaded=took.append)
    assert type(made.of(AdapterKind.LORA)) is residency
    assert (made.of(AdapterKind.ESFT) is not None) == with_esft
    if esft is not None:
        made.retain(ESFT)
        made.acquire(ESFT.digest)
        made.of(AdapterKind.ESFT).advance(device(), 1, 0, 0)
        assert made.acquire(ESFT.digest) == 3
        assert len(took) == 1
        assert isinstance(made.of(AdapterKind.PAIR), PairResidency)
