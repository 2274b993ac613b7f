"""An instance stands in for its LoRA Server where there is room."""

from support.doubles.residency_doubles import LORA, OTHER, OneStep, Server, Slots, Whole, device

from lora_jax.adapters.kinds import AdapterKind
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.stand_in_residency import StandInResidency


class Case:
    def __init__(self):
        self.server, self.whole, self.device = Server(), Whole(), device()
        loader = AdapterLoader(Slots(2), OneStep)
        self.residency = StandInResidency(loader, self.server, self.whole)
        for one in (LORA, OTHER):
            self.residency.retain(one)
            self.residency.acquire(one.digest)
        self.advance()

    def advance(self):
        return self.residency.advance(self.device, 10, 4, 3)


def test_while_the_server_is_lost_who_has_room_is_served_here():
    case, digest = Case(), LORA.digest
    residency = case.residency
    assert residency.acquire(digest) == 0
    case.server.is_lost = True
    case.server.failures = [(digest, "lost"), (OTHER.digest, "lost")]
    assert residency.servable_here([digest, "unknown"]) == {digest, "unknown"}
    assert residency.acquire(digest) is None  # a sequence is in the other slot still
    assert residency.is_loading(digest)
    residency.release(digest)
    assert residency.acquire(digest) == 7
    assert not residency.is_loading(digest)
    assert case.server.bound == {0: digest, 7: "local"}
    assert case.advance() == [(OTHER.digest, "lost")]  # there is room for one
    assert not case.whole.instead
    case.server.is_lost, case.server.failures = False, []
    assert residency.acquire(digest) == 7  # all of its sequences are in one slot
    assert residency.acquire(OTHER.digest) == 1
    residency.release(digest)
    assert residency.acquire(digest) == 0
    case.advance()
    assert case.whole.collected == 2


def test_an_adapter_that_is_served_here_has_no_place_to_take():
    case = Case()
    assert case.residency.pool_of(LORA.digest) is AdapterKind.LORA
    case.server.is_lost, case.whole.known = True, {LORA.digest}
    assert case.residency.pool_of(LORA.digest) is None  # its place is not the device loader's


def test_an_adapter_that_the_server_refuses_is_served_here():
    case = Case()
    case.server.ready, case.server.failures = False, [(LORA.digest, "broken files")]
    assert case.residency.acquire(LORA.digest) is None
    assert case.advance() == []
    assert case.whole.instead == {LORA.digest}
    assert case.residency.acquire(LORA.digest) == 7


def test_what_is_kept_for_a_lost_server_waits_until_it_is_back():
    case = Case()
    case.whole.is_busy = True
    assert case.residency.is_busy
    case.server.is_lost = True
    assert not case.residency.is_busy
    for one in (LORA, OTHER):
        case.residency.drop(one.digest)
    assert case.whole.known == set()
    case.residency.check_integrity()
    assert case.whole.is_checked
