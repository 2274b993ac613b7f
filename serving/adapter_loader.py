"""Brings adapters onto the device a few chunks per step, and tells the scheduler who is there.

The registry knows adapters by name, this knows their weights by digest: those of loaded names, and
those that live requests still need after a reload or an unload.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable

from lora_jax.adapters.registry import AdapterEntry
from lora_jax.adapters.residency import Placement, SlotAllocator
from lora_jax.adapters.slots import AdapterSlots, LoadingPlan
from lora_jax.adapters.weights import AdapterWeights


@dataclasses.dataclass(frozen=True)
class ResidencySnapshot:
    """What is on the device, for any thread to read."""

    resident: frozenset[str] = frozenset()  # digests
    slots_used: int = 0
    slots_total: int = 0
    bytes_used: int = 0
    swaps: int = 0  # adapters brought onto the device since the start


@dataclasses.dataclass(eq=False)
class _Known:
    """Weights of one digest, how many live requests need them, and whether a name stands for it."""

    weights: AdapterWeights
    requests: int = 0
    named: bool = False
    pinned: bool = False


@dataclasses.dataclass(eq=False)
class _Load:
    """A placed adapter on its way; the plan is made when its first chunk is due."""

    placement: Placement
    plan: LoadingPlan | None = None
    started_s: float = 0.0


class AdapterLoader:
    """The scheduler's `AdapterResidency`. The engine's thread uses it; others may call `retain`
    while they hold the engine's lock, and read `snapshot`.
    """

    def __init__(
        self, allocator: SlotAllocator, *, on_loaded: Callable[[float], None] = lambda _: None
    ):
        """`on_loaded` is told how many seconds each load took."""
        self._allocator, self._on_loaded = allocator, on_loaded
        self._known: dict[str, _Known] = {}
        self._loads: deque[_Load] = deque()
        self._swaps = 0
        self.snapshot = ResidencySnapshot()
        self._publish()

    # The scheduler's side.

    def acquire(self, digest: str) -> int | None:
        """Return the slot and count one more user; None while the adapter is not resident.

        When it has no place yet it gets one as soon as there is room, and its load starts.
        """
        self._allocator.restore(digest)
        if self._allocator.slot_of(digest) is not None:
            return self._allocator.acquire(digest)
        if not self._allocator.is_loading(digest):
            self._place(self._known[digest])
        return None

    def release(self, digest: str) -> None:
        """Count one user less."""
        self._allocator.release(digest)

    def is_loading(self, digest: str) -> bool:
        """Return whether the adapter has a place but is not yet resident."""
        return self._allocator.is_loading(digest)

    # The engine's side.

    def check_fits(self, weights: AdapterWeights) -> None:
        """Raise ValueError when the adapter would not fit even on an empty device."""
        self._allocator.check_fits(weights)

    def retain(self, entry: AdapterEntry) -> None:
        """Keep the entry's weights until a request that needs them ends (`drop`)."""
        self._know(entry).requests += 1

    def drop(self, digest: str) -> None:
        """One request that needed these weights has ended."""
        self._known[digest].requests -= 1
        self._forget_if_unneeded(digest)

    def reconcile(self, entries: Iterable[AdapterEntry]) -> None:
        """Follow the registry: `entries` are all loaded adapters, pinned ones come first.

        Weights without a name and without requests leave the device; named ones enter it while
        there are free slots.
        """
        for known in self._known.values():
            known.named = known.pinned = False
        for entry in entries:
            known = self._know(entry)
            known.named, known.pinned = True, known.pinned or entry.pinned
        for digest in tuple(self._known):
            self._forget_if_unneeded(digest)
        named = [known for known in self._known.values() if known.named]
        for known in sorted(named, key=lambda known: not known.pinned):
            self._prefetch(known)

    def advance(self, slots: AdapterSlots, max_chunks: int) -> AdapterSlots:
        """Return `slots` (donated) after up to `max_chunks` writes of the loads under way."""
        while self._loads and max_chunks > 0:
            load = self._loads[0]
            if load.plan is None:
                load.plan, load.started_s = LoadingPlan(load.placement, slots), time.monotonic()
            before = load.plan.remaining
            slots = load.plan.advance(slots, max_chunks)
            max_chunks -= before - load.plan.remaining
            if load.plan.done:
                self._loads.popleft()
                self._allocator.finish_loading(load.placement.digest)
                self._swaps += 1
                self._on_loaded(time.monotonic() - load.started_s)
                self._publish()
        return slots

    @property
    def is_busy(self) -> bool:
        """Whether any load is under way."""
        return bool(self._loads)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other while nothing runs."""
        self._allocator.check_integrity()
        assert not self._loads, f"{len(self._loads)} loads are left"
        for digest, known in self._known.items():
            assert known.named or known.requests, f"{digest[:12]} is kept for nobody"
            assert not self._allocator.users(digest), f"{digest[:12]} is in use"
        assert set(self._allocator.resident()) <= set(self._known), "resident but unknown"

    def _know(self, entry: AdapterEntry) -> _Known:
        if entry.digest not in self._known:
            self._known[entry.digest] = _Known(entry.weights)
        return self._known[entry.digest]

    def _forget_if_unneeded(self, digest: str) -> None:
        known = self._known[digest]
        if known.named or known.requests > 0:
            return
        del self._known[digest]
        self._allocator.retire(digest)
        self._publish()

    def _prefetch(self, known: _Known) -> None:
        digest = known.weights.digest
        self._allocator.restore(digest)
        placed = self._allocator.is_loading(digest) or self._allocator.slot_of(digest) is not None
        if placed:
            self._allocator.pin(digest, known.pinned)
            return
        if known.pinned or self.snapshot.slots_used < self.snapshot.slots_total:
            self._place(known)

    def _place(self, known: _Known) -> None:
        """Give the adapter a slot and rows if there is room, and queue its load."""
        if not self._allocator.can_place(known.weights):
            return
        placement = self._allocator.place(known.weights, pinned=known.pinned)
        self._loads.append(_Load(placement))
        self._publish()

    def _publish(self) -> None:
        stats = self._allocator.stats()
        self.snapshot = ResidencySnapshot(
            resident=frozenset(self._allocator.resident()),
            slots_used=stats.slots_used,
            slots_total=stats.slots_total,
            bytes_used=stats.bytes_used,
            swaps=self._swaps,
        )
