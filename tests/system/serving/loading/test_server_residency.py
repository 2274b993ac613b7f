"""LoRA adapters with a part on a LoRA Server: both parts must be there."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases
from support.doubles.late_copier import LateCopier
from support.doubles.residency_doubles import LORA, OTHER, OneStep, Server, Slots, device

from serving.loading.adapter_loader import AdapterLoader
from serving.loading.server_residency import ServerResidency


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
