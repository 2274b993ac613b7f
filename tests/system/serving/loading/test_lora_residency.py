"""LoRA adapters in an engine's own slots."""

from support.cases import adapter_cases
from support.doubles.late_copier import LateCopier
from support.doubles.residency_doubles import LORA, OneStep, Slots, device

from serving.loading.adapter_loader import AdapterLoader
from serving.loading.lora_residency import LoraResidency


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


def test_matrices_are_pinned_for_the_copier():
    weights = adapter_cases.weights(adapter_cases.llama(), 4, seed=1)
    copier = LateCopier()
    kept = LoraResidency(AdapterLoader(Slots(1), OneStep), copier).keep(weights)
    assert kept is weights
    assert copier.log == ["pin"] * len(list(weights.matrices()))
