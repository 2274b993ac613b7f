"""All kinds of adapters behind one `AdapterResidency`.

To scheduler and step an adapter slot is one number: the LoRA slots come first, the ESFT slots
follow. Each kind has a loader of its own, which a digest finds by the kind of its entry.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from lora_jax.adapters.entries import AdapterEntry, PairWeights
from lora_jax.adapters.slots import AdapterSlots
from serving.loading.adapter_loader import AdapterLoader, ResidencySnapshot
from serving.loading.expert_loading import ExpertRoom
from serving.loading.local_experts import LocalExperts
from serving.lora_server.instance import InstanceSide


class DeviceTables(Protocol):
    """The runner's arrays that say which adapters there are."""

    slots: AdapterSlots | None
    reroute_tables: Any

    def set_remote(self, slot_to_number: np.ndarray, version: int) -> None: ...


@dataclasses.dataclass(eq=False)
class _Pair:
    """A LoRA and an ESFT adapter that live requests use together."""

    weights: PairWeights
    requests: int = 0

    @property
    def digests(self) -> tuple[str, str]:
        return self.weights.lora.digest, self.weights.esft.digest


class AdapterLoaders:
    """The scheduler's `AdapterResidency` over LoRA and, where it is on, ESFT; threads as one
    AdapterLoader has them.
    """

    def __init__(
        self,
        lora: AdapterLoader,
        num_lora_slots: int,
        esft: AdapterLoader | None = None,
        room: ExpertRoom | None = None,
        remote: InstanceSide | None = None,
        local: LocalExperts | None = None,
    ):
        """`esft` and `room` go together; `remote` holds the experts' part of LoRA adapters, for
        which `local` stands in while it is lost.
        """
        self._lora, self._esft, self._room, self._remote = lora, esft, room, remote
        self._local = local
        self._dispatched = 0
        self._num_lora_slots = num_lora_slots
        self._num_slots = num_lora_slots + (0 if esft is None else esft.snapshot.slots_total)
        self._pairs: dict[str, _Pair] = {}  # LoRA and ESFT adapters that requests use together

    # The scheduler's side.

    def acquire(self, digest: str) -> int | None:
        """Return the slot and count one more user; None while the adapter is not resident.

        The slot of a LoRA and an ESFT adapter together comes after all others: see
        serving.steps.step.split_slots.
        """
        if digest in self._pairs:
            return self._acquire_both(self._pairs[digest].weights)
        loader = self._loader_of(digest)
        if self._remote is not None and (local := self._serving_here(digest)) is not None:
            # Sequences of one adapter are in one slot: others are about to leave theirs.
            slot = None if loader.users(digest) else local.acquire(digest)
            if slot is not None:
                self._remote.bind_local(slot)
            return slot
        slot = loader.acquire(digest)
        if slot is None or loader is not self._lora:
            return slot if slot is None else self._num_lora_slots + slot
        if self._remote is not None:
            if not self._remote.is_ready(digest):
                loader.release(digest)
                return None
            self._remote.bind(slot, digest)
        return slot

    def release(self, digest: str) -> None:
        """Count one user less."""
        if digest in self._pairs:
            for part in self._pairs[digest].digests:
                self.release(part)
            return
        if self._local is not None and self._local.users(digest):
            self._local.release(digest)
        else:
            self._loader_of(digest).release(digest)

    def is_loading(self, digest: str) -> bool:
        """Return whether the adapter has a place but is not yet resident."""
        if digest in self._pairs:
            return any(map(self.is_loading, self._pairs[digest].digests))
        if (local := self._serving_here(digest)) is not None:
            return local.is_loading(digest)
        waits = self._remote is not None and not self._remote.is_ready(digest)
        return waits or self._loader_of(digest).is_loading(digest)

    def pool_of(self, digest: str) -> str | None:
        """Name the slots that the adapter takes one of; None where nobody may take its place."""
        loader = self._loader_of(digest)
        if loader.is_pinned(digest) or self._serving_here(digest) is not None:
            return None
        return "lora" if loader is self._lora else "esft"

    # The engine's side.

    def in_use(self) -> frozenset[str]:
        """Return the weights that live requests need; any thread may ask."""
        return frozenset().union(*(loader.in_use() for loader in self._loaders))

    def retain(self, entry: AdapterEntry) -> None:
        """Keep the entry's weights until a request that needs them ends (`drop`)."""
        if isinstance(entry.weights, PairWeights):
            pair = self._pairs.setdefault(entry.digest, _Pair(entry.weights))
            pair.requests += 1
            for part in (pair.weights.lora, pair.weights.esft):
                self.retain(part)
            return
        self._loader_for(entry).retain(entry)
        if self._remote is not None:
            self._remote.retain(entry)
        if self._local is not None:
            self._local.retain(entry)

    def drop(self, digest: str) -> None:
        """One request that needed these weights has ended."""
        if digest in self._pairs:
            pair = self._pairs[digest]
            pair.requests -= 1
            if not pair.requests:
                del self._pairs[digest]
            for part in pair.digests:
                self.drop(part)
            return
        self._loader_of(digest).drop(digest)
        if self._remote is not None:
            self._remote.drop(digest, self._dispatched)
        if self._local is not None:
            self._local.drop(digest)

    def prepare(self, device: DeviceTables, dispatched: int) -> None:
        """Tell the device what the next step, number `dispatched`, must know of the server."""
        self._dispatched = dispatched + 1
        table = None if self._remote is None else self._remote.take_table()
        if table is not None:
            device.set_remote(*table)

    def harmed_by(self, status: Any) -> frozenset[str]:
        """Return the adapters whose requests a step may have affected, by the server's statuses."""
        if self._remote is None or status is None:
            return frozenset()
        return self._remote.harmed_by(np.asarray(status))

    def reconcile(self, entries: Iterable[AdapterEntry]) -> None:
        """Follow the registry: `entries` are all loaded adapters."""
        entries = list(entries)
        for loader in self._loaders:
            loader.reconcile(entry for entry in entries if self._loader_for(entry) is loader)

    def advance(
        self, device: DeviceTables, max_chunks: int, dispatched: int, read: int
    ) -> list[tuple[str, str]]:
        """Write up to `max_chunks` of the loads under way and free what no step can read.

        `dispatched` steps were sent to the device so far, the results of `read` have come back.
        Returns (digest, why) of loads that have failed for good; their requests must end.
        """
        if device.slots is not None:
            device.slots = self._lora.advance(device.slots, max_chunks)
        failures = []
        if self._remote is not None:
            self._remote.collect(read)
            failures = self._not_here(self._remote.take_failures())
            if self._local is not None and not self._remote.is_lost:
                self._local.collect()
        if self._esft is None or self._room is None:
            return failures
        if self._room.collect(dispatched, read):
            self._esft.look_again()
        device.reroute_tables = self._esft.advance(device.reroute_tables, max_chunks)
        return failures + self._with_pairs(self._esft.take_failures())

    @property
    def is_busy(self) -> bool:
        """True if `advance` has anything to do."""
        freeing = self._room is not None and self._room.is_busy
        remote = self._remote is not None and self._remote.is_busy
        if self._local is not None and self._remote is not None:
            remote |= self._local.is_busy and not self._remote.is_lost
        return freeing or remote or any(loader.is_busy for loader in self._loaders)

    @property
    def snapshot(self) -> ResidencySnapshot:
        """Residents of the device, of all kinds; any thread may ask."""
        lora = self._lora.snapshot
        if self._esft is None or self._room is None:
            return lora
        esft = self._esft.snapshot
        return ResidencySnapshot(
            resident=lora.resident | esft.resident,
            slots_used=lora.slots_used + esft.slots_used,
            slots_total=lora.slots_total + esft.slots_total,
            bytes_used=lora.bytes_used + esft.bytes_used,
            swaps=lora.swaps + esft.swaps,
            expert_page_bytes=self._room.tensors.pages().used_bytes,
        )

    def rest(self) -> None:
        """Give the device back what unloaded adapters have left; for when nothing is to be done."""
        if self._room is not None:
            self._room.tensors.trim()

    def close(self) -> None:
        """Give the adapters' memory back; nothing may run on the device any more."""
        if self._room is not None:
            self._room.close()
        if self._remote is not None:
            self._remote.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other while nothing runs."""
        for loader in self._loaders:
            loader.check_integrity()
        if self._room is not None:
            self._room.check_integrity()
        if self._remote is not None:
            self._remote.check_integrity()
        if self._local is not None:
            self._local.check_integrity()
        assert not self._pairs, f"{len(self._pairs)} pairs are kept for nobody"

    def servable_here(self, digests: Iterable[str]) -> frozenset[str]:
        """Return those adapters for whose experts there is room on the device now."""
        local = self._local
        return frozenset(d for d in digests if local is not None and local.can_serve(d))

    def _serving_here(self, digest: str) -> LocalExperts | None:
        """Return who serves the adapter's experts on this device, if the server does not."""
        local, remote = self._local, self._remote
        if local is None or remote is None or not local.knows(digest):
            return None
        return local if remote.is_lost or local.stands_in(digest) else None

    def _not_here(self, failures: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return what the server's failure ends: not what can be served without it."""
        here = self.servable_here(digest for digest, _ in failures)
        if self._local is not None and self._remote is not None and not self._remote.is_lost:
            for digest in here:
                self._local.serve_instead(digest)
        return [(digest, why) for digest, why in failures if digest not in here]

    def _acquire_both(self, pair: PairWeights) -> int | None:
        """Return the slot of two adapters, with one more user each, or None and none more."""
        lora, esft = (self.acquire(part.digest) for part in (pair.lora, pair.esft))
        if lora is not None and esft is not None:
            place = (esft - self._num_lora_slots) * self._num_lora_slots + lora
            return self._num_slots + place
        for part, slot in ((pair.lora, lora), (pair.esft, esft)):
            if slot is not None:
                self.release(part.digest)
        return None

    def _with_pairs(self, failures: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the failures, and those of the pairs that need what has failed."""
        pairs = tuple(self._pairs.items())
        more = [(d, why) for failed, why in failures for d, pair in pairs if failed in pair.digests]
        return failures + more

    @property
    def _loaders(self) -> list[AdapterLoader]:
        return [loader for loader in (self._lora, self._esft) if loader is not None]

    def _loader_for(self, entry: AdapterEntry) -> AdapterLoader:
        return self._esft if self._esft is not None and entry.kind == "esft" else self._lora

    def _loader_of(self, digest: str) -> AdapterLoader:
        known = self._esft is not None and self._esft.knows(digest)
        return self._esft if known and self._esft is not None else self._lora
