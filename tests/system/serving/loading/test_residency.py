"""Every residency asks its loader, and needs nothing else."""

import pytest
from support.doubles.residency_doubles import LORA, OneStep, Slots, device, entry

from lora_jax.adapters.kinds import AdapterKind
from serving.loading.adapter_loader import AdapterLoader, ResidencySnapshot
from serving.loading.residency import AbstractLoaderResidency, AbstractResidency


class Plain(AbstractLoaderResidency):
    kind = AdapterKind.LORA

    def advance(self, device, max_chunks, dispatched, read):
        device.slots = self._loader.advance(device.slots, max_chunks)
        return []


def test_a_residency_brings_in_counts_and_lets_go_by_its_loader():
    loader, arrays = AdapterLoader(Slots(2), OneStep), device()
    plain, digest = Plain(loader), LORA.digest
    assert not plain.knows(digest)
    plain.retain(LORA)
    assert (plain.knows(digest), plain.in_use()) == (True, {digest})
    assert plain.acquire(digest) is None
    assert (plain.is_loading(digest), plain.is_busy) == (True, True)
    plain.advance(arrays, 4, 0, 0)
    assert (arrays.slots, plain.is_busy, plain.acquire(digest)) == ((digest,), False, 0)
    assert plain.snapshot is loader.snapshot
    with pytest.raises(AssertionError, match="in use"):
        plain.check_integrity()
    plain.release(digest)
    plain.drop(digest)
    plain.check_integrity()


def test_what_only_some_kinds_do_is_nothing_by_default():
    plain, arrays = Plain(AdapterLoader(Slots(1), OneStep)), device()
    plain.prepare(arrays, 3)
    plain.call_on_news(lambda: None)
    plain.rest()
    plain.close()
    assert (arrays.told, arrays.slots) == ([], ())
    assert plain.affected_by([1]) == plain.servable_here([LORA.digest]) == frozenset()
    assert plain.failed_with([(LORA.digest, "broken")]) == []


def test_the_registry_hears_what_does_not_fit_and_keeps_what_does():
    plain = Plain(AdapterLoader(Slots(1), OneStep))
    plain.check_fits(LORA.weights)
    assert plain.keep(LORA.weights) is LORA.weights
    assert plain.keep_composed(LORA.weights) is LORA.weights
    with pytest.raises(ValueError, match="too large"):
        plain.check_fits(entry("x", AdapterKind.LORA, too_large=True).weights)


class Nothing(AbstractResidency):
    """A kind without slots and loads of its own."""

    kind = AdapterKind.PAIR

    def check_fits(self, weights):
        pass

    def knows(self, digest):
        return False

    def acquire(self, digest):
        pass

    release = is_loading = pool_of = retain = drop = acquire

    def check_integrity(self):
        pass


def test_a_kind_may_have_no_loads_of_its_own():
    nothing, arrays = Nothing(), device()
    nothing.follow([])
    assert nothing.advance(arrays, 9, 1, 1) == []
    assert (arrays.slots, nothing.is_busy, nothing.in_use()) == ((), False, frozenset())
    assert nothing.snapshot == ResidencySnapshot()
