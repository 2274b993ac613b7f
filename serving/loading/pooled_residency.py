"""LoRA adapters whose rank rows lie in a pool of pages that KV shares."""

import time

from lora_jax.adapters.row_copies import Copier
from lora_jax.adapters.slots import clear_slots
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.lora_residency import HostForm, LoraResidency
from serving.loading.page_room import PageRoom
from serving.loading.residency import DeviceTables, Failures

# Steps after an eviction in which adapters that fit now are loaded. Pages are short for 64 steps
# after a claim that had to wait; a pinned adapter that never fits must not keep the engine awake.
_LOOKS = 128


class PooledLoraResidency(LoraResidency):
    """LoRA adapters of an engine with a page pool; it frees what KV leaves there, too."""

    def __init__(
        self,
        loader: AdapterLoader,
        room: PageRoom,
        copier: Copier | None = None,
        host_form: HostForm | None = None,
    ):
        super().__init__(loader, copier, host_form)
        self._room, self._num_looks = room, 0

    def prepare(self, device: DeviceTables, dispatched: int) -> None:
        super().prepare(device, dispatched)
        self._room.finish_clears()

    def advance(
        self, device: DeviceTables, max_chunks: int, dispatched: int, read: int
    ) -> Failures:
        begun = time.perf_counter()
        if (left := self._room.take_left_slots()) and device.slots is not None:
            device.slots = clear_slots(device.slots, left)
        gone = self._room.collect(dispatched, read)
        self._room.spent(time.perf_counter() - begun)
        self._look_again(bool(gone))  # which counts its own time
        begun = time.perf_counter()
        failures = super().advance(device, max_chunks, dispatched, read)
        self._room.spent(time.perf_counter() - begun)
        return failures

    def _look_again(self, is_gone: bool) -> None:
        """Load adapters that fit since pages were freed: only pinned ones while claims wait."""
        self._num_looks = _LOOKS if is_gone else max(0, self._num_looks - 1)
        if not self._num_looks:
            return
        if self._room.is_short:
            self._loader.look_for_pinned()
        else:
            self._loader.look_again()
            self._num_looks = 0

    @property
    def is_busy(self) -> bool:
        return self._room.is_busy or self._num_looks > 0 or super().is_busy

    def rest(self) -> None:
        self._room.rest()

    def close(self) -> None:
        self._room.close()

    def check_integrity(self) -> None:
        super().check_integrity()
        self._room.check_integrity()
