"""Brings adapters onto the device a few chunks per step, and tells the scheduler who is there.

The registry knows adapters by name, this knows their weights by digest: those of loaded names, and
those that live requests still need after a reload or an unload.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lora_jax.adapters.allocator import AbstractAllocator
from lora_jax.adapters.entries import AdapterEntry, PairWeights
from lora_jax.adapters.lora_load_job import LoadFailed, LoraLoadJob
from lora_jax.adapters.weights import AnyWeights
from serving.loading.known_adapter import KnownAdapter

logger = logging.getLogger(__name__)

_BETWEEN_LOOKS = 2  # chunks: those of a small adapter, and its entries in the table
RETRY_S = 0.25  # after a load that found no memory
Changes = Sequence[tuple[str, AdapterEntry | None]]  # a name, and what it stands for in memory now


class AnyPlacement(Protocol):
    """Destination of an adapter on the device."""

    @property
    def digest(self) -> str: ...


class LoadJob[S](Protocol):
    """The writes of one load; S is what a step reads to find the adapter, changed last."""

    @property
    def remaining(self) -> int: ...

    @property
    def done(self) -> bool: ...

    def advance(self, state: S, max_chunks: int, /) -> S:
        """Return the state after more writes. A job that raises LoadFailed has not donated it."""
        ...


@dataclasses.dataclass(frozen=True)
class ResidencySnapshot:
    """Snapshot of the device's adapters, for any thread to read."""

    resident: frozenset[str] = frozenset()  # digests
    slots_used: int = 0
    slots_total: int = 0
    bytes_used: int = 0
    swaps: int = 0  # adapters brought onto the device since the start
    expert_page_bytes: int = 0  # physical pages behind the experts, the base's included

    def __add__(self, other: "ResidencySnapshot") -> "ResidencySnapshot":
        """Return the snapshot of the adapters of both."""
        return ResidencySnapshot(
            resident=self.resident | other.resident,
            slots_used=self.slots_used + other.slots_used,
            slots_total=self.slots_total + other.slots_total,
            bytes_used=self.bytes_used + other.bytes_used,
            swaps=self.swaps + other.swaps,
            expert_page_bytes=self.expert_page_bytes + other.expert_page_bytes,
        )


@dataclasses.dataclass(eq=False)
class _Load[P: AnyPlacement, S]:
    """A placed adapter on its way; the job is made when its first chunk is due."""

    placement: P
    job: LoadJob[S] | None = None
    started_s: float = 0.0


class AdapterLoader[P: AnyPlacement, S]:
    """Loads of one kind of adapter, for its residency. The engine's thread uses it;
    others may call `retain` while they hold the engine's lock, and read `snapshot`.
    """

    def __init__(
        self,
        allocator: AbstractAllocator[Any, P, Any],
        make_job: Callable[[P, S], LoadJob[S]] = LoraLoadJob,
        *,
        at_once: int = 1,
        on_loaded: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`on_loaded` is told how many seconds each load took. While bytes of one load are on their
        way others begin, up to `at_once`, which the jobs must allow.
        """
        self._allocator, self._make_job, self._at_once = allocator, make_job, at_once
        self._on_loaded, self._clock = on_loaded, clock
        self._known: dict[str, KnownAdapter] = {}
        self._needed: set[str] = set()  # those that live requests need
        self._digests: dict[str, str] = {}  # by name
        self._pinned: list[KnownAdapter] = []
        allocator.is_needed = self._is_needed
        self._loads: deque[_Load[P, S]] = deque()
        self._failures: list[tuple[str, str]] = []
        self._swaps = 0
        self.runs: Callable[[], bool] = lambda: True  # the device, beside which loads are written
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

    def prefetch(self, digest: str) -> None:
        """Start the load of a known adapter that has no place, if it finds one that is free."""
        self._prefetch(self._known[digest])

    def release(self, digest: str) -> None:
        """Count one user less."""
        self._allocator.release(digest)

    def is_loading(self, digest: str) -> bool:
        """Return whether the adapter has a place but is not yet resident."""
        return self._allocator.is_loading(digest)

    def is_resident(self, digest: str) -> bool:
        """Return whether all of the adapter is on the device."""
        return self._allocator.slot_of(digest) is not None

    def protect(self, digests: frozenset[str]) -> None:
        """Evict none of these for another's sake until the next call."""
        self._allocator.protect(digests)

    def is_placed(self, digest: str) -> bool:
        """Return whether the adapter is resident or loading."""
        return self.is_loading(digest) or self.is_resident(digest)

    def is_pinned(self, digest: str) -> bool:
        """Return whether the adapter is never evicted to make room."""
        adapter = self._known.get(digest)
        return adapter is not None and adapter.pinned

    def weights(self, digest: str) -> AnyWeights | None:
        """Return the weights of a known adapter."""
        adapter = self._known.get(digest)
        return None if adapter is None else adapter.weights

    def users(self, digest: str) -> int:
        """Return how many sequences hold the adapter now."""
        return self._allocator.users(digest)

    def check_fits(self, weights: AnyWeights) -> None:
        """Raise ValueError when the adapter would not fit even on an empty device; any thread."""
        self._allocator.check_fits(weights)

    def can_place(self, weights: AnyWeights) -> bool:
        """Return whether these weights, which have no place yet, would get one now."""
        return self._allocator.can_place(weights)

    # The engine's side.

    def knows(self, digest: str) -> bool:
        """Return whether a loaded name or a live request needs these weights."""
        return digest in self._known

    def in_use(self) -> frozenset[str]:
        """Return the weights that live requests need; any thread may ask."""
        return frozenset(self._needed)  # a copy, made in one go: others may `retain`

    def retain(self, entry: AdapterEntry) -> None:
        """Keep the entry's weights until a request that needs them ends (`drop`)."""
        adapter = self._know(entry)
        adapter.requests += 1
        self._needed.add(entry.digest)
        adapter.arrive(self._clock())

    def drop(self, digest: str) -> None:
        """One request that needed these weights has ended."""
        adapter = self._known[digest]
        adapter.requests -= 1
        if not adapter.requests:
            self._needed.discard(digest)
        self._forget_if_unneeded(digest)

    def follow(self, changes: Changes) -> None:
        """Follow the registry: `changes` are what names stand for from now on.

        Weights without a name and without requests leave the device; named ones enter it while
        there is room, pinned ones first.
        """
        before: list[str] = []  # digests
        pins = False
        for name, entry in changes:
            if (digest := self._digests.pop(name, None)) is not None:
                pins |= self._known[digest].names.pop(name)
                before.append(digest)
            if entry is not None:
                self._digests[name], pins = entry.digest, pins or entry.pinned
                self._know(entry).names[name] = entry.pinned
        now = {entry.digest for _, entry in changes if entry is not None}
        for digest in {*before, *now} & self._known.keys():
            self._forget_if_unneeded(digest)
            self._keep(digest)
        if pins:
            self._pinned = [adapter for adapter in self._known.values() if adapter.pinned]
        is_missing = any(not self.is_placed(adapter.weights.digest) for adapter in self._pinned)
        if self._has_free_slot or is_missing:
            self.look_again()

    def look_again(self, *, freed: bool = False) -> None:
        """Bring named adapters onto the device while there is room: pinned ones first, then those
        that most requests have named lately. Only pinned ones have others leave.

        None of them takes the memory that has gone for the sake of one that requests wait for: one
        that lacked memory or, where some was `freed` just now, one that has no place.
        """
        # A copy, made in one go: other threads may `retain` meanwhile.
        adapters = tuple(self._known.values())
        waiting = [
            adapter for adapter in adapters if adapter.wanted and self._lacks(adapter, freed)
        ]
        named = [adapter for adapter in waiting or adapters if adapter.named]
        now = self._clock()
        for adapter in sorted(named, key=lambda one: (not one.pinned, -one.rate(now))):
            self._prefetch(adapter)

    def look_for_pinned(self) -> None:
        """Bring pinned adapters onto the device that are not there, and have others leave."""
        for adapter in self._pinned:
            self._prefetch(adapter)

    def advance(self, state: S, max_chunks: int) -> S:
        """Return `state` (donated) after up to `max_chunks` writes of the loads under way.

        After each two it ends if nothing `runs` any more: a step that is due waits for no others.
        """
        num_late = 0  # of the oldest loads, whose bytes are on their way
        while num_late < min(len(self._loads), self._at_once) and max_chunks > 0:
            load = self._loads[num_late]
            if load.job is None:
                load.job = self._make_job(load.placement, state)
                load.started_s = self._clock()
            before = load.job.remaining
            try:
                state = load.job.advance(state, min(max_chunks, _BETWEEN_LOOKS))
            except LoadFailed as error:
                self._loads.remove(load)
                self._give_up(load, error)
                return state
            begun = before - load.job.remaining
            max_chunks -= begun
            if load.job.done:
                self._loads.remove(load)
                self._allocator.finish_loading(load.placement.digest)
                if adapter := self._known.get(load.placement.digest):
                    adapter.lacked_memory = False
                self._swaps += 1
                self._on_loaded(self._clock() - load.started_s)
                self._publish()
            elif not begun:
                num_late += 1
            if begun and not self.runs():
                break
        return state

    def spent(self, seconds: float) -> None:
        """Note for how long loads kept the engine's thread busy."""
        self._allocator.spent(seconds)

    def take_failures(self) -> list[tuple[str, str]]:
        """Return, once, (digest, why) of loads that failed with nothing left to wait for."""
        failures, self._failures = self._failures, []
        return failures

    @property
    def is_busy(self) -> bool:
        """True if any load is under way."""
        return bool(self._loads)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other while nothing runs."""
        self._allocator.check_integrity()
        assert not self._loads, f"{len(self._loads)} loads are left"
        needed = {digest for digest, adapter in self._known.items() if adapter.requests}
        assert needed == self._needed, "who is needed"
        for digest, adapter in self._known.items():
            assert adapter.named or adapter.requests, f"{digest[:12]} is kept for nobody"
            assert not self._allocator.users(digest), f"{digest[:12]} is in use"
        assert set(self._allocator.resident()) <= set(self._known), "resident but unknown"

    def _is_needed(self, digest: str) -> bool:
        """Return whether a live request names the adapter."""
        return digest in self._needed

    def _lacks(self, adapter: KnownAdapter, freed: bool) -> bool:
        """Return whether room that was `freed` may be what the adapter waits for."""
        return adapter.lacked_memory or (freed and not self.is_placed(adapter.weights.digest))

    def _know(self, entry: AdapterEntry) -> KnownAdapter:
        if entry.digest not in self._known:
            assert not isinstance(entry.weights, PairWeights), "a pair has no slot of its own"
            self._known[entry.digest] = KnownAdapter(entry.weights)
        return self._known[entry.digest]

    def _forget_if_unneeded(self, digest: str) -> None:
        adapter = self._known[digest]
        if adapter.named or adapter.requests > 0:
            return
        del self._known[digest]
        if self.is_placed(digest):  # most that leave host memory have left the device before
            self._allocator.retire(digest)
            self._publish()

    def _keep(self, digest: str) -> None:
        """Have weights that a name stands for stay where they are on the device."""
        adapter = self._known.get(digest)
        if adapter is not None and adapter.named and self.is_placed(digest):
            self._allocator.restore(digest)
            self._allocator.pin(digest, adapter.pinned)

    @property
    def _has_free_slot(self) -> bool:
        return self.snapshot.slots_used < self.snapshot.slots_total

    def _prefetch(self, adapter: KnownAdapter) -> None:
        if self.is_placed(adapter.weights.digest):
            return
        fits = self._has_free_slot and self._allocator.has_room(adapter.weights)
        if adapter.pinned or fits:
            self._place(adapter)

    def _place(self, adapter: KnownAdapter) -> None:
        """Give the adapter a slot and room if there is any, and queue its load."""
        too_early = adapter.lacked_memory and self._allocator.num_leaving
        if too_early or self._clock() < adapter.retry_s:
            return
        before = self._allocator.num_leaving
        placement = self._allocator.try_place(adapter.weights, pinned=adapter.pinned)
        if placement is not None:
            self._loads.append(_Load(placement))
        elif self._allocator.num_leaving == before:
            return  # dozens may ask in vain in each step
        self._publish()

    def _give_up(self, load: _Load[P, S], error: LoadFailed) -> None:
        """Free what a failed load held. It is tried again when there may be memory, else reported.

        If anybody waits for it, an idle adapter goes for its sake; with none, others that are in
        use or load may leave, or have left and not given their memory back yet.
        """
        digest, leaving = load.placement.digest, self._allocator.num_leaving
        self._allocator.abandon_loading(digest)
        adapter = self._known.get(digest)
        if adapter is None:
            self._publish()
            return
        logger.warning("Adapter %s could not be loaded: %s", digest[:12], error)
        adapter.lacked_memory = error.may_pass
        evicted = error.may_pass and adapter.wanted and self._allocator.evict_idle()
        others = error.may_pass and (self._loads or self._allocator.resident() or leaving)
        if not evicted:
            adapter.retry_s = self._clock() + RETRY_S
        if not (evicted or others):
            adapter.lacked_memory = False
            self._failures.append((digest, str(error)))
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
