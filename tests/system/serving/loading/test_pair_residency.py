"""A LoRA and an ESFT adapter together: both are there, or experts alone are held."""

import pytest
from support.doubles.residency_doubles import (
    ESFT,
    LORA,
    OTHER,
    OneStep,
    Room,
    Slots,
    device,
    entry,
    pair,
)

from lora_jax.adapters.kinds import AdapterKind
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.esft_residency import EsftResidency
from serving.loading.lora_residency import LoraResidency
from serving.loading.pair_residency import PairResidency
from serving.loading.residencies import Residencies

BOTH = pair(OTHER, ESFT)


class Case:
    """Two LoRA slots and one of ESFT."""

    def __init__(self):
        self.room, self.device = Room(), device()
        self.lora = AdapterLoader(Slots(2), OneStep)
        self.esft = AdapterLoader(Slots(1), OneStep)
        lora, esft = LoraResidency(self.lora), EsftResidency(self.esft, self.room, 2)
        self.pairs = PairResidency(lora, esft, 2, 3)
        self.all = Residencies([lora, esft, self.pairs])

    def advance(self):
        return self.all.advance(self.device, 10, 4, 3)


def test_a_pair_has_a_slot_behind_all_others_when_both_are_there():
    case = Case()
    case.all.retain(LORA)
    case.all.acquire(LORA.digest)  # in slot 0
    case.all.retain(BOTH)
    assert case.all.in_use() == {LORA.digest, OTHER.digest, ESFT.digest}
    assert case.all.acquire(BOTH.digest) is None
    assert case.all.is_loading(BOTH.digest)
    assert case.all.pool_of(BOTH.digest) is AdapterKind.LORA
    assert case.advance() == []
    assert not case.all.is_loading(BOTH.digest)
    assert case.all.acquire(BOTH.digest) == 3 + 0 * 2 + 1
    assert (case.lora.users(OTHER.digest), case.esft.users(ESFT.digest)) == (1, 1)
    case.all.release(BOTH.digest)
    case.all.drop(BOTH.digest)
    assert not case.pairs.knows(BOTH.digest)
    case.all.drop(LORA.digest)
    case.all.check_integrity()


@pytest.mark.parametrize(("there", "held"), [(OTHER, 0), (ESFT, 1)])
def test_while_one_is_not_there_experts_alone_are_held(there, held):
    case = Case()
    case.all.retain(there)
    case.all.acquire(there.digest)
    case.advance()
    case.all.retain(BOTH)
    assert case.all.acquire(BOTH.digest) is None
    assert case.lora.users(OTHER.digest) == 0
    assert case.esft.users(ESFT.digest) == held


def test_nothing_is_loaded_or_evicted_for_a_pair_whose_experts_find_no_slot():
    case = Case()
    other = entry("other experts", AdapterKind.ESFT)
    for one in (other, BOTH):
        case.all.retain(one)
    case.all.acquire(other.digest)
    case.advance()
    assert case.all.acquire(other.digest) is not None  # a request runs on it
    for _ in range(3):
        assert case.all.acquire(BOTH.digest) is None
        case.advance()
    assert not case.lora.is_placed(OTHER.digest)
    case.all.release(other.digest)
    case.all.drop(other.digest)
    case.esft._allocator.evict_idle()
    assert case.all.acquire(BOTH.digest) is None
    assert case.lora.is_loading(OTHER.digest)  # beside the experts
    assert case.esft.is_loading(ESFT.digest)


def test_a_pair_stays_until_its_last_request_ends():
    case = Case()
    case.all.retain(BOTH)
    case.all.retain(BOTH)
    case.all.drop(BOTH.digest)
    assert case.pairs.knows(BOTH.digest)
    with pytest.raises(AssertionError, match="1 pairs"):
        case.pairs.check_integrity()
    case.all.drop(BOTH.digest)
    case.all.check_integrity()


def test_what_fails_fails_its_pairs():
    case = Case()
    case.all.retain(BOTH)
    failed = [(ESFT.digest, "no memory"), (LORA.digest, "broken")]
    assert case.pairs.failed_with(failed) == [(BOTH.digest, "no memory")]
    case.esft._failures = [(ESFT.digest, "no memory")]
    assert case.advance() == [(ESFT.digest, "no memory"), (BOTH.digest, "no memory")]


class Evicting(Slots):
    """Slots from which an idle adapter goes for another's sake."""

    def make_room(self, weights):
        return self.can_place(weights) or (self.evict_idle() and self.can_place(weights))


def job_of(chunks):
    """Return a kind of jobs, each of which takes so many turns."""

    class Job(OneStep):
        def __init__(self, placement, state):
            super().__init__(placement, state)
            self.remaining = chunks

        def advance(self, state, max_chunks):
            self.remaining -= 1
            return state

    return Job


@pytest.mark.parametrize(("of_lora", "of_esft"), [(1, 2), (1, 8), (2, 1), (2, 5), (3, 8)])
def test_pairs_that_want_one_slot_do_not_take_parts_from_one_another_for_ever(of_lora, of_esft):
    """However long the loads of either kind take, one pair after the other is served."""
    loaders = [AdapterLoader(Evicting(1), job_of(chunks)) for chunks in (of_lora, of_esft)]
    lora, esft = LoraResidency(loaders[0]), EsftResidency(loaders[1], Room(), 1)
    residencies = Residencies([lora, esft, PairResidency(lora, esft, 1, 2)])
    entries = [
        pair(entry(f"l{n}", AdapterKind.LORA), entry(f"e{n}", AdapterKind.ESFT)) for n in range(3)
    ]
    for one in entries:
        residencies.retain(one)
    waiting, turns = [one.digest for one in entries], 0
    while waiting and turns < 300:
        turns += 1
        entered = [digest for digest in waiting if residencies.acquire(digest) is not None]
        residencies.advance(device(), 1, 4, 3)
        for digest in entered:
            residencies.release(digest)
            residencies.drop(digest)
            waiting.remove(digest)
    assert not waiting
    residencies.check_integrity()


def test_experts_that_a_pair_holds_go_with_its_last_request():
    case = Case()
    case.lora.follow([])
    case.all.retain(BOTH)
    case.all.acquire(BOTH.digest)
    case.esft.advance((), 1)  # LoRA's part is still on its way
    assert case.all.acquire(BOTH.digest) is None
    assert case.esft.users(ESFT.digest) == 1
    assert case.all.acquire(BOTH.digest) is None
    assert case.esft.users(ESFT.digest) == 1
    case.all.drop(BOTH.digest)
    assert case.esft.users(ESFT.digest) == 0
    case.advance()
    case.all.check_integrity()


def test_a_pair_that_is_there_is_protected_by_its_parts():
    case = Case()
    case.all.retain(BOTH)
    assert not case.all.is_resident(BOTH.digest)
    case.all.acquire(BOTH.digest)
    case.advance()
    assert case.all.is_resident(BOTH.digest)
    case.all.protect(frozenset({BOTH.digest}))
    for loader in (case.lora, case.esft):
        assert not loader._allocator.evict_idle()
    case.all.retain(LORA)
    case.all.acquire(LORA.digest)
    case.advance()
    case.all.protect(frozenset({BOTH.digest, LORA.digest}))  # no part takes another's place
    assert not case.lora._allocator.evict_idle()
    case.all.protect(frozenset())
    assert case.lora._allocator.evict_idle()
