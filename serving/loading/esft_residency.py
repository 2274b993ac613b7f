"""ESFT adapters: whole experts in the model's virtual weight tensors."""

import dataclasses
import time

from lora_jax.adapters.kinds import AdapterKind
from serving.loading.adapter_loader import AdapterLoader, ResidencySnapshot
from serving.loading.expert_loading import ExpertRoom
from serving.loading.residency import AbstractLoaderResidency, DeviceTables, Failures


class EsftResidency(AbstractLoaderResidency):
    """ESFT adapters on the device; their slots follow those of other kinds."""

    kind = AdapterKind.ESFT

    def __init__(self, loader: AdapterLoader, room: ExpertRoom, first_slot: int):
        """`first_slot` is the number by which scheduler and step know the loader's slot 0."""
        super().__init__(loader)
        self.room, self._first_slot = room, first_slot

    def acquire(self, digest: str) -> int | None:
        slot = super().acquire(digest)
        return None if slot is None else self._first_slot + slot

    def advance(
        self, device: DeviceTables, max_chunks: int, dispatched: int, read: int
    ) -> Failures:
        begun = time.perf_counter()
        if self.room.collect(dispatched, read):
            self._loader.look_again(freed=True)
        device.reroute_tables = self._loader.advance(device.reroute_tables, max_chunks)
        self._loader.spent(time.perf_counter() - begun)
        return self._loader.take_failures()

    @property
    def is_busy(self) -> bool:
        return self.room.is_busy or super().is_busy

    @property
    def snapshot(self) -> ResidencySnapshot:
        used = self.room.tensors.pages().used_bytes
        return dataclasses.replace(super().snapshot, expert_page_bytes=used)

    def rest(self) -> None:
        self.room.tensors.trim()

    def close(self) -> None:
        self.room.close()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.room.check_integrity()
