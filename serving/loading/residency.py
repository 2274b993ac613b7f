"""Protocol of the residencies: one for each kind of adapter.

A residency brings the adapters of its kind onto the device, gives their slots to the scheduler, and
answers the registry, which asks before it keeps an adapter. `residencies` joins them.
"""

import abc
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.slots import AdapterSlots
from lora_jax.adapters.weights import AnyWeights
from serving.loading.adapter_loader import AdapterLoader, Changes, ResidencySnapshot

Failures = list[tuple[str, str]]  # (digest, why) of loads that have failed for good


class DeviceTables(Protocol):
    """The runner's arrays that say which adapters there are."""

    slots: AdapterSlots | None
    reroute_tables: Any

    def set_remote(self, slot_to_number: np.ndarray, version: int) -> None: ...


class AbstractResidency(abc.ABC):
    """Residency of one kind of adapter on the device.

    The engine's thread uses it. Any thread may call `check_fits`, `keep`, `keep_composed`, `in_use`
    and `snapshot`, and `retain` while it holds the engine's lock.
    """

    kind: AdapterKind

    # The registry's side.

    @abc.abstractmethod
    def check_fits(self, weights: AnyWeights) -> None:
        """Raise ValueError when the adapter would not fit even on an empty device."""

    def keep(self, weights: AnyWeights) -> AnyWeights:
        """Return the form in which the host keeps the weights of files."""
        return weights

    def keep_composed(self, weights: AnyWeights) -> AnyWeights:
        """Return the form in which the host keeps weights composed of such that it keeps."""
        return weights

    def in_use(self) -> frozenset[str]:
        """Return the weights that live requests need."""
        return frozenset()

    # The scheduler's side, as scheduling.adapter_gate.AdapterResidency.

    @abc.abstractmethod
    def knows(self, digest: str) -> bool:
        """Return whether a loaded name or a live request needs these weights."""

    @abc.abstractmethod
    def acquire(self, digest: str) -> int | None:
        """Return the slot and count one more user; None while the adapter is not resident."""

    @abc.abstractmethod
    def release(self, digest: str) -> None:
        """Count one user less."""

    @abc.abstractmethod
    def is_loading(self, digest: str) -> bool:
        """Return whether the adapter has a place but is not yet resident."""

    def is_resident(self, digest: str) -> bool:
        """Return whether `acquire` would return a slot, as far as that is known."""
        del digest
        return False

    def protect(self, digests: frozenset[str]) -> None:
        """Evict none of these for another's sake until the next call; others' are ignored."""
        del digests

    @abc.abstractmethod
    def pool_of(self, digest: str) -> AdapterKind | None:
        """Name the slots that the adapter takes one of; None where nobody may take its place."""

    # The engine's side.

    @abc.abstractmethod
    def retain(self, entry: AdapterEntry) -> None:
        """Keep the entry's weights until a request that needs them ends (`drop`)."""

    @abc.abstractmethod
    def drop(self, digest: str) -> None:
        """One request that needed these weights has ended."""

    def follow(self, changes: Changes) -> None:
        """Follow the registry, as far as it has changed."""
        del changes

    def prepare(self, device: DeviceTables, dispatched: int) -> None:
        """Tell the device what the next step, number `dispatched`, must know."""
        del device, dispatched

    def advance(
        self, device: DeviceTables, max_chunks: int, dispatched: int, read: int
    ) -> Failures:
        """Write up to `max_chunks` of the loads under way and free what no step can read.

        `dispatched` steps were sent to the device so far, the results of `read` have come back.
        """
        del device, max_chunks, dispatched, read
        return []

    def look_at(self, runs: Callable[[], bool]) -> None:
        """Have the next `advance` ask `runs`, after some writes, whether to go on."""
        del runs

    def failed_with(self, failures: Failures) -> Failures:
        """Return the failures of adapters that need one of another kind that has failed."""
        del failures
        return []

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
        return False

    @property
    def snapshot(self) -> ResidencySnapshot:
        """Adapters of this kind on the device."""
        return ResidencySnapshot()

    @property
    def resident(self) -> frozenset[str]:
        """Digests of this kind's adapters on the device, as in `snapshot`; any thread may ask."""
        return frozenset()

    def rest(self) -> None:
        """Give the device back what unloaded adapters have left; for when nothing is to be done."""
        return

    def close(self) -> None:
        """Give the adapters' memory back; nothing may run on the device any more."""
        return

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other while nothing runs."""


class AbstractLoaderResidency(AbstractResidency):
    """Residency of a kind whose adapters have slots and loads of their own."""

    def __init__(self, loader: AdapterLoader):
        self._loader = loader

    def check_fits(self, weights: AnyWeights) -> None:
        self._loader.check_fits(weights)

    def in_use(self) -> frozenset[str]:
        return self._loader.in_use()

    def knows(self, digest: str) -> bool:
        return self._loader.knows(digest)

    def acquire(self, digest: str) -> int | None:
        return self._loader.acquire(digest)

    def release(self, digest: str) -> None:
        self._loader.release(digest)

    def is_loading(self, digest: str) -> bool:
        return self._loader.is_loading(digest)

    def is_resident(self, digest: str) -> bool:
        return self._loader.is_resident(digest)

    def protect(self, digests: frozenset[str]) -> None:
        self._loader.protect(digests)

    def pool_of(self, digest: str) -> AdapterKind | None:
        return None if self._loader.is_pinned(digest) else self.kind

    def retain(self, entry: AdapterEntry) -> None:
        self._loader.retain(entry)

    def drop(self, digest: str) -> None:
        self._loader.drop(digest)

    def follow(self, changes: Changes) -> None:
        self._loader.follow(changes)

    def look_at(self, runs: Callable[[], bool]) -> None:
        self._loader.runs = runs

    @property
    def is_busy(self) -> bool:
        return self._loader.is_busy

    @property
    def snapshot(self) -> ResidencySnapshot:
        return self._loader.snapshot

    @property
    def resident(self) -> frozenset[str]:
        return self._loader.snapshot.resident

    def check_integrity(self) -> None:
        self._loader.check_integrity()
