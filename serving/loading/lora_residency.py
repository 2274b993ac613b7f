"""LoRA adapters that lie in this engine's own slots, all modules of them."""

import contextlib
from collections.abc import Callable

from lora_jax.adapters.host_table import HostTable
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.row_copies import Copier, pin_matrices
from lora_jax.adapters.weights import AdapterWeights, AnyWeights
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.mergeable import Mergeable
from serving.loading.residency import AbstractLoaderResidency, DeviceTables, Failures

HostForm = Callable[[AdapterWeights], AdapterWeights]


class LoraResidency(AbstractLoaderResidency):
    """LoRA adapters of an engine without a LoRA Server; their slots are the first."""

    kind = AdapterKind.LORA

    def __init__(
        self,
        loader: AdapterLoader,
        copier: Copier | None = None,
        host_form: HostForm | None = None,
        table: HostTable | None = None,
    ):
        """With a `copier` the host's matrices are pinned for it; `host_form` makes of an adapter
        what this engine holds of it, by default all as it is. A `table` is told the steps.
        """
        super().__init__(loader)
        self._copier, self._host_form, self._table = copier, host_form, table
        self._mergeable: Mergeable | None = None

    def merge_into(self, mergeable: Mergeable) -> None:
        """Say which adapters merged weights can stand for; without this, none."""
        self._mergeable = mergeable

    def can_merge(self, digest: str) -> bool:
        """True for a known adapter that merged weights can stand for."""
        weights = self._loader.weights(digest)
        if self._mergeable is None or not isinstance(weights, AdapterWeights):
            return False
        return self._mergeable.holds(weights)

    def keep(self, weights: AnyWeights) -> AnyWeights:
        assert isinstance(weights, AdapterWeights), "found by its kind"
        form = self._host_form
        return self.keep_composed(weights if form is None else form(weights))

    def keep_composed(self, weights: AnyWeights) -> AnyWeights:
        kept = pin_matrices(weights, self._copier)
        return kept.prepared() if isinstance(kept, AdapterWeights) else kept

    def close(self) -> None:
        if self._copier is not None:  # no byte may be on its way to arrays that go now
            with contextlib.suppress(MemoryError, ValueError, OSError, RuntimeError):
                self._copier.finish_writes()

    def advance(
        self, device: DeviceTables, max_chunks: int, dispatched: int, read: int
    ) -> Failures:
        if self._table is not None:
            self._table.note(dispatched, read)
        if device.slots is not None:
            device.slots = self._loader.advance(device.slots, max_chunks)
        return self._loader.take_failures()
