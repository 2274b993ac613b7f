"""A LoRA and an ESFT adapter together: both are there, or neither has a user."""

import pytest
from support.doubles.residency_doubles import ESFT, LORA, OTHER, OneStep, Room, Slots, device, pair

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


@pytest.mark.parametrize("there", [OTHER, ESFT])
def test_while_one_is_not_there_the_other_has_no_user(there):
    case = Case()
    case.all.retain(there)
    case.all.acquire(there.digest)
    case.advance()
    case.all.retain(BOTH)
    assert case.all.acquire(BOTH.digest) is None
    assert case.lora.users(OTHER.digest) == case.esft.users(ESFT.digest) == 0


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
