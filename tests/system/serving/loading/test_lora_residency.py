"""LoRA adapters in an engine's own slots."""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from support.cases import adapter_cases
from support.doubles.late_copier import LateCopier
from support.doubles.residency_doubles import LORA, OneStep, Slots, device

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.row_copies import LoraCopyJob
from lora_jax.adapters.slots import init_slots, size_slots
from lora_jax.adapters.weights import AdapterWeights
from serving.loading.adapter_loader import RETRY_S, AdapterLoader
from serving.loading.lora_residency import LoraResidency

CATALOGUE = adapter_cases.llama(hidden=8, inner=6, vocab=10)


def broken(why):
    """A method that fails."""

    def fail(*_):
        raise RuntimeError(why)

    return fail


def test_loads_go_into_the_slots_and_leave_the_reroute_tables():
    lora, arrays = LoraResidency(AdapterLoader(Slots(2), OneStep)), device()
    tables = arrays.reroute_tables
    lora.retain(LORA)
    assert lora.acquire(LORA.digest) is None
    assert lora.advance(arrays, 5, 0, 0) == []
    assert arrays.slots == (LORA.digest,)
    assert arrays.reroute_tables is tables
    assert lora.acquire(LORA.digest) == 0


def test_an_engine_without_slots_has_nothing_to_write():
    lora, arrays = LoraResidency(AdapterLoader(Slots(2), OneStep)), device()
    arrays.slots = None
    assert lora.advance(arrays, 5, 0, 0) == []
    assert arrays.slots is None


def test_what_placing_asks_for_is_computed_by_who_reads(monkeypatch):
    weights, same = (adapter_cases.weights(CATALOGUE, 4, seed=1) for _ in range(2))
    spec = size_slots(CATALOGUE, 1, 4, 4)
    allocator = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows)
    kept = LoraResidency(AdapterLoader(allocator)).keep(weights)
    wanted = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows).place(same)

    def at_the_wrong_time(*arguments):
        raise AssertionError("the engine's thread looks through the matrices")

    monkeypatch.setattr(AdapterWeights, "matrices", at_the_wrong_time)
    found = allocator.place(kept)
    np.testing.assert_array_equal(found.entries, wanted.entries)
    assert found.writes.keys() == wanted.writes.keys()


def test_the_host_cuts_the_weights_of_files_and_pins_all():
    weights, cut = (adapter_cases.weights(adapter_cases.llama(), 4, seed=seed) for seed in (1, 2))
    assert LoraResidency(AdapterLoader(Slots(1), OneStep)).keep(weights) is weights
    forms, copier = {weights.digest: cut}, LateCopier()
    lora = LoraResidency(
        AdapterLoader(Slots(1), OneStep), copier, lambda given: forms[given.digest]
    )
    kept = [lora.keep(weights), lora.keep_composed(weights)]
    assert copier.log == ["pin"] * 2
    for packed, given in zip(kept, (cut, weights), strict=True):
        for one, other in zip(packed.matrices(), given.matrices(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_copier_that_fails_ends_the_load_alone_and_a_later_one_succeeds():
    """Its requests are told why; the engine's thread, which calls this, goes on."""
    spec, copier, now = size_slots(CATALOGUE, 2, 4, 4), LateCopier(), [100.0]
    make_job = functools.partial(LoraCopyJob, copier=copier)
    allocator = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows)
    lora = LoraResidency(AdapterLoader(allocator, make_job, clock=lambda: now[0]), copier)
    one, other = (
        AdapterEntry(name, weights.report.kind, weights.digest, 1, weights, False, name)
        for name in "ab"
        for weights in [adapter_cases.weights(CATALOGUE, 4, seed=ord(name))]
    )
    arrays = SimpleNamespace(slots=init_slots(CATALOGUE, spec, jnp.dtype("float32")))
    copier.finish_writes, finish = broken("no pinned memory"), copier.finish_writes

    def failures_of(entry):
        lora.retain(entry)
        assert lora.acquire(entry.digest) is None
        failures = []
        while lora.is_busy:
            failures += lora.advance(arrays, 1000, 0, 0)
        return failures

    assert failures_of(one) == [(one.digest, "no pinned memory")]
    copier.finish_writes = finish
    assert failures_of(other) == []
    assert lora.acquire(other.digest) is not None
    now[0] += RETRY_S
    lora.drop(one.digest)
    assert failures_of(one) == []
    assert lora.acquire(one.digest) is not None


def test_no_copy_is_under_way_to_arrays_of_an_engine_that_has_closed():
    copier = LateCopier(late=1_000_000)
    lora = LoraResidency(AdapterLoader(Slots(1), OneStep), copier)
    array = jnp.zeros(4)
    copier.begin_write_into(array, 0, np.ones(4, np.float32))
    lora.close()
    assert not copier.begun
    assert array.sum() == 4
    copier.finish_writes = broken("a copy has failed")
    lora.close()
