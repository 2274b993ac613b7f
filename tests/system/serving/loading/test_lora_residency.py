"""LoRA adapters in an engine's own slots."""

from support.cases import adapter_cases
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


def test_the_host_keeps_an_adapter_in_the_form_that_is_asked_for():
    weights, cut = (adapter_cases.weights(adapter_cases.llama(), 4, seed=seed) for seed in (1, 2))
    loader = AdapterLoader(Slots(1), OneStep)
    assert LoraResidency(loader).keep(weights) is weights
    forms = {weights.digest: cut}
    assert LoraResidency(loader, lambda given: forms[given.digest]).keep(weights) is cut
