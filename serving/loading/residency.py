"""Protocol of the residencies: one for each kind of adapter, all over one AdapterLoader.

A residency brings the adapters of its kind onto the device, gives their slots to the scheduler, and
answers the registry, which asks before it keeps an adapter. `residencies` joins them.
"""

import abc
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.registry import AdapterEntry
from lora_jax.adapters.slots import AdapterSlots
from lora_jax.adapters.weights import AnyWeights
from serving.loading.adapter_loader import AdapterLoader, ResidencySnapshot

Failures = list[tuple[str, str]]  # (digest, why) of loads that have failed for good


class DeviceTables(Protocol):
    """The runner's arrays that say which adapters there are."""

    slots: AdapterSlots | None
    reroute_tables: Any

    def set_remote(self, slot_to_number: np.ndarray, version: int) -> None: ...


class AbstractResidency(abc.ABC):
    """Residency of one kind of adapter on the device.

    The engine's thread uses it, as it uses an AdapterLoader. Any thread may call `check_fits`,
    `keep`, `in_use` and `snapshot`, and `retain` while it holds the engine's lock.
    """

    kind: AdapterKind

    def __init__(self, loader: AdapterLoader):
        self._loader = loader

    # The registry's side.

    def check_fits(self, weights: AnyWeights) -> None:
        """Raise ValueError when the adapter would not fit even on an empty device."""
        self._loader.check_fits(weights)

    def keep(self, weights: AnyWeights) -> AnyWeights:
        """Return the form in which the host keeps the weights."""
        return weights

    def in_use(self) -> frozenset[str]:
        """Return the weights that live requests need."""
        return self._loader.in_use()

    # The scheduler's side, as scheduling.adapter_gate.AdapterResidency.

    def knows(self, digest: str) -> bool:
        """Return whether a loaded name or a live request needs these weights."""
        return self._loader.knows(digest)

    def acquire(self, digest: str) -> int | None:
        """Return the slot and count one more user; None while the adapter is not resident."""
        return self._loader.acquire(digest)

    def release(self, digest: str) -> None:
        """Count one user less."""
        self._loader.release(digest)

    def is_loading(self, digest: str) -> bool:
        """Return whether the adapter has a place but is not yet resident."""
        return self._loader.is_loading(digest)

    # The engine's side.

    def retain(self, entry: AdapterEntry) -> None:
        """Keep the entry's weights until a request that needs them ends (`drop`)."""
        self._loader.retain(entry)

    def drop(self, digest: str) -> None:
        """One request that needed these weights has ended."""
        self._loader.drop(digest)

    def reconcile(self, entries: Iterable[AdapterEntry]) -> None:
        """Follow the registry: `entries` are all loaded adapters of this kind."""
        self._loader.reconcile(entries)

    def prepare(self, device: DeviceTables, dispatched: int) -> None:
        """Tell the device what the next step, number `dispatched`, must know."""
        del device, dispatched

    @abc.abstractmethod
    def advance(
        self, device: DeviceTables, max_chunks: int, dispatched: int, read: int
    ) -> Failures:
        """Write up to `max_chunks` of the loads under way and free what no step can read.

        `dispatched` steps were sent to the device so far, the results of `read` have come back.
        """

    def affected_by(self, status: Any) -> frozenset[str]:
        """Return the adapters whose requests a step with this status may have affected."""
        del status
        return frozenset()

    def servable_here(self, digests: Iterable[str]) -> frozenset[str]:
        """Return those adapters that the device can serve without a LoRA Server now."""
        del digests
        return frozenset()

    def call_on_news(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when another thread has something for `advance` to do."""
        del wake

    @property
    def is_busy(self) -> bool:
        """True if `advance` has anything to do."""
        return self._loader.is_busy

    @property
    def snapshot(self) -> ResidencySnapshot:
        """Adapters of this kind on the device."""
        return self._loader.snapshot

    def rest(self) -> None:
        """Give the device back what unloaded adapters have left; for when nothing is to be done."""
        return

    def close(self) -> None:
        """Give the adapters' memory back; nothing may run on the device any more."""
        return

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other while nothing runs."""
        self._loader.check_integrity()
