"""LoRA adapters with a part on a LoRA Server: both parts must be there."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases
from support.doubles.late_copier import LateCopier
from support.doubles.residency_doubles import (
    LORA,
    OTHER,
    OneStep,
    Server,
    Slots,
    device,
    entry,
)

from lora_jax.adapters.kinds import AdapterKind
from serving.api.request import Request, Sequence
from serving.api.sampling import Sampling
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.server_residency import ServerResidency
from serving.scheduling.adapter_gate import AdapterGate


class Case:
    def __init__(self):
        self.server, self.device = Server(), device()
        self.residency = ServerResidency(AdapterLoader(Slots(2), OneStep), self.server)
        self.residency.retain(LORA)
        assert self.residency.acquire(LORA.digest) is None
        self.advance()

    def advance(self):
        return self.residency.advance(self.device, 10, 4, 3)


def test_an_adapter_has_a_slot_when_the_server_has_its_part():
    case, digest = Case(), LORA.digest
    assert case.server.read == [3]
    case.server.ready = False
    assert case.residency.is_loading(digest)
    assert case.residency.acquire(digest) is None
    assert case.server.bound == {}
    case.server.ready = True
    assert not case.residency.is_loading(digest)
    assert case.residency.acquire(digest) == 0
    assert case.server.bound == {0: digest}
    case.residency.release(digest)
    case.residency.drop(digest)
    case.residency.check_integrity()


def test_a_lease_goes_back_after_the_steps_that_were_sent():
    case = Case()
    case.server.table = (np.array([1]), 2)
    case.residency.prepare(case.device, 6)
    case.residency.prepare(case.device, 7)
    assert len(case.device.told) == 1
    case.residency.drop(LORA.digest)
    assert case.server.dropped == [(LORA.digest, 8)]


def test_failures_and_news_are_the_servers():
    case = Case()
    case.server.failures, case.server.affected = [(OTHER.digest, "lost")], frozenset({"d"})
    assert case.advance() == [(OTHER.digest, "lost")]
    assert case.residency.affected_by(None) == frozenset()
    assert case.residency.affected_by([0, 3]) == {"d"}
    assert case.residency.servable_here([LORA.digest]) == frozenset()
    wake = object()
    case.residency.call_on_news(wake)
    assert case.server.wake is wake
    assert not case.residency.is_busy
    case.server.is_busy = True
    assert case.residency.is_busy
    case.residency.close()
    assert case.server.closed == 1
    with pytest.raises(AssertionError):
        case.residency.check_integrity()


def test_the_host_keeps_what_the_server_leaves():
    case = Case()
    weights, part = (adapter_cases.weights(adapter_cases.llama(), 4, seed=seed) for seed in (1, 2))
    case.server.kept[weights.digest] = part
    assert case.residency.keep(weights) is part


def test_a_closed_engine_has_left_the_server_and_no_copy_is_under_way():
    copier, server, array = LateCopier(late=1_000_000), Server(), jnp.zeros(4)
    residency = ServerResidency(AdapterLoader(Slots(2), OneStep), server, copier)
    copier.begin_write_into(array, 0, np.ones(4, np.float32))
    residency.close()
    assert server.closed == 1
    assert not copier.begun


class Evicting(Slots):
    """Slots from which an idle adapter goes for another's sake."""

    def make_room(self, weights):
        return self.can_place(weights) or (self.evict_idle() and self.can_place(weights))


class Leasing(Server):
    """A server that has its part of some adapters."""

    def __init__(self):
        super().__init__()
        self.leased = set()

    def is_ready(self, digest):
        return digest in self.leased


def waiting_for(digest: str, number: int) -> Sequence:
    settings = {"on_output": lambda delta: None, "arrival_s": 0.0, "deadline_s": 0.0}
    request = Request(f"r{number}", (1,), Sampling(), digest, digest, **settings)
    return Sequence(request=request, index=0, seed=0, token_ids=[1], number=number)


def test_adapters_that_the_server_lacks_hold_no_slots_against_those_that_it_has():
    """With as many slots as the server has places each would wait for the other for ever."""
    server, at = Leasing(), device()
    residency = ServerResidency(AdapterLoader(Evicting(2), OneStep), server)
    gate = AdapterGate(residency, 600.0)
    waiting = []
    for number, digest in enumerate("cdea"):
        residency.retain(entry(digest, AdapterKind.LORA))
        waiting.append(waiting_for(f"digest-{digest}", number))

    def turn() -> list[str]:
        gate.start_round()
        gate.hold([one for one in waiting if one.slot < 0], 4)
        entered = [one.request.adapter_digest[-1] for one in waiting if gate.enter(one, 0.0)]
        residency.advance(at, 10, 4, 3)
        return entered

    assert [turn(), turn()] == [[], []]
    assert residency.snapshot.resident == {
        "digest-c",
        "digest-d",
    }  # in free slots
    server.leased = {"digest-a"}
    assert turn() == []  # it is loaded in the place of one of them
    assert turn() == ["a"]
    resident = residency.snapshot.resident
    assert [turn(), turn()] == [["a"], ["a"]]
    assert residency.snapshot.resident == resident  # nobody takes turns in the other slot
    gate.leave(waiting.pop())
    server.leased = {"digest-c", "digest-d", "digest-e"}
    entered = {digest for _ in range(6) for digest in turn()}
    assert len(entered) == 2
