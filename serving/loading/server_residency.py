"""LoRA adapters of which a LoRA Server holds a part."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.row_copies import Copier
from lora_jax.adapters.weights import AdapterWeights
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.lora_residency import HostForm, LoraResidency
from serving.loading.residency import DeviceTables, Failures
from serving.lora_server.instance import InstanceSide
from serving.lora_server.sides import RemoteSide


class ServerResidency(LoraResidency):
    """LoRA adapters whose experts' part is on a LoRA Server, and whose rest is in own slots.

    An adapter is resident when both parts are there. Requests of adapters that the server has lost
    fail.
    """

    def __init__(
        self,
        loader: AdapterLoader,
        server: RemoteSide,
        copier: Copier | None = None,
        host_form: HostForm | None = None,
    ):
        """`host_form` makes of what stays beside a LoRA Server what the host keeps."""
        form = host_form if isinstance(server, InstanceSide) else None

        def keep(weights: AdapterWeights) -> AdapterWeights:
            kept = server.keep(weights)
            return kept if form is None else form(kept)

        super().__init__(loader, copier, keep)
        self.server = server
        self._dispatched = 0

    def acquire(self, digest: str) -> int | None:
        """As LoraResidency; without its part on the server an adapter has no other one leave.

        Those that have a part there need the slots: adapters that wait for one another's would
        wait for ever.
        """
        if not self.server.is_ready(digest):
            self._loader.prefetch(digest)
            return None
        slot = super().acquire(digest)
        if slot is not None:
            self.server.bind(slot, digest)
        return slot

    def is_resident(self, digest: str) -> bool:
        return self.server.is_ready(digest) and super().is_resident(digest)

    def is_loading(self, digest: str) -> bool:
        return not self.server.is_ready(digest) or super().is_loading(digest)

    def retain(self, entry: AdapterEntry) -> None:
        super().retain(entry)
        self.server.retain(entry)

    def drop(self, digest: str) -> None:
        super().drop(digest)
        self.server.drop(digest, self._dispatched)

    def prepare(self, device: DeviceTables, dispatched: int) -> None:
        self._dispatched = dispatched + 1
        table = self.server.take_table()
        if table is not None:
            device.set_remote(*table)

    def advance(
        self, device: DeviceTables, max_chunks: int, dispatched: int, read: int
    ) -> Failures:
        failures = super().advance(device, max_chunks, dispatched, read)
        self.server.collect(read)
        return failures + self.server.take_failures()

    def affected_by(self, status: Any) -> frozenset[str]:
        return frozenset() if status is None else self.server.affected_by(np.asarray(status))

    def call_on_news(self, wake: Callable[[], None]) -> None:
        self.server.wake = wake

    @property
    def is_busy(self) -> bool:
        return self.server.is_busy or super().is_busy

    def close(self) -> None:
        self.server.close()
        super().close()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.server.check_integrity()
