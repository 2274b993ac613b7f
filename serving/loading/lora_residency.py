"""LoRA adapters that lie in this engine's own slots, all modules of them."""

from collections.abc import Callable

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterWeights, AnyWeights
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.residency import AbstractResidency, DeviceTables, Failures

HostForm = Callable[[AdapterWeights], AdapterWeights]


class LoraResidency(AbstractResidency):
    """LoRA adapters of an engine without a LoRA Server; their slots are the first."""

    kind = AdapterKind.LORA

    def __init__(self, loader: AdapterLoader, host_form: HostForm = lambda weights: weights):
        """`host_form` pins or cuts what the host keeps of an adapter."""
        super().__init__(loader)
        self._host_form = host_form

    def keep(self, weights: AnyWeights) -> AnyWeights:
        assert isinstance(weights, AdapterWeights), "found by its kind"
        return self._host_form(weights)

    def advance(
        self, device: DeviceTables, max_chunks: int, dispatched: int, read: int
    ) -> Failures:
        if device.slots is not None:
            device.slots = self._loader.advance(device.slots, max_chunks)
        return self._loader.take_failures()
