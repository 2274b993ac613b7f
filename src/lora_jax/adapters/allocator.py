"""Adapter slot allocation, reference counts and eviction, for every kind of adapter. No jax.

The key is the digest of the files, not the name: a reload of other weights under the same name is
another adapter here, so that requests admitted on the old weights finish on them.

Life of an adapter: `place` gives it a slot and room, it is loading; `finish_loading` makes it
resident; `acquire` and `release` count the sequences that use it; while it is loading, pinned or
in use it is never evicted; an idle one is evicted, least recently used first, when another
adapter needs its place. `retire` frees it as soon as nobody uses it (unload, reload).
"""

import abc
import dataclasses
from collections.abc import Callable

from lora_jax.adapters.weights import AnyWeights


@dataclasses.dataclass(frozen=True)
class ResidencyStats:
    """Fill level of the device's adapter slots."""

    slots_used: int
    slots_total: int
    bytes_used: int
    bytes_total: int
    rows_used: dict[int, int] = dataclasses.field(default_factory=dict)  # by width; LoRA
    rows_total: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Placed[R]:
    """One adapter that owns a slot and room."""

    slot: int
    room: R
    pinned: bool
    loading: bool = True
    retired: bool = False
    users: int = 0

    @property
    def evictable(self) -> bool:
        """True if it may go for another adapter's sake."""
        return not (self.users or self.pinned or self.loading)


class AbstractAllocator[W: AnyWeights, P, R](abc.ABC):
    """Slots and room for adapters of one kind: weights W, placements P, room R; one thread."""

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise ValueError(f"Adapters need at least 1 slot, not {num_slots}.")
        self.num_slots = num_slots
        self._free_slots = list(range(num_slots))
        self._placed: dict[str, Placed[R]] = {}  # least recently used first
        self._protected: frozenset[str] = frozenset()
        self.is_needed: Callable[[str], bool] = lambda digest: False  # a live request names it

    # What a kind of adapter says itself.

    @abc.abstractmethod
    def check_fits(self, weights: W) -> None:
        """Raise ValueError when the adapter would not fit even on an empty device."""

    @abc.abstractmethod
    def can_place(self, weights: W) -> bool:
        """Return whether `place` would succeed now. Changes nothing."""

    def has_room(self, weights: W) -> bool:
        """Return whether `place` would succeed now and evict no adapter. Changes nothing."""
        return self.can_place(weights)

    @abc.abstractmethod
    def place(self, weights: W, *, pinned: bool = False) -> P:
        """Give the adapter a slot and room, evicting idle ones as needed; it is then loading.

        Raises ValueError when it is already placed or cannot be placed now (see can_place), and
        then changes nothing.
        """

    @property
    def num_leaving(self) -> int:
        """Adapters that have left, whose room is not free yet."""
        return 0

    @abc.abstractmethod
    def stats(self) -> ResidencyStats:
        """Return slots and bytes in use and in total."""

    @abc.abstractmethod
    def _take_back(self, placed: Placed[R]) -> None:
        """Take slot and room of an adapter that has left."""

    def make_room(self, weights: W) -> bool:
        """Return whether the adapter can be placed now; if not, start what may change that."""
        return self.can_place(weights)

    def try_place(self, weights: W, *, pinned: bool = False) -> P | None:
        """Return what `place` does; None where there is no room now, as `make_room` says."""
        return self.place(weights, pinned=pinned) if self.make_room(weights) else None

    def spent(self, seconds: float) -> None:
        """Note for how long loads kept the engine's thread busy. Without a pool nobody asks."""
        del seconds

    # The same for all kinds.

    def slot_of(self, digest: str) -> int | None:
        """Return the slot of a resident adapter (all weights on the device), else None."""
        placed = self._placed.get(digest)
        return placed.slot if placed and not placed.loading else None

    def is_loading(self, digest: str) -> bool:
        """Return whether the adapter has a place but not yet all its weights."""
        placed = self._placed.get(digest)
        return placed is not None and placed.loading

    def users(self, digest: str) -> int:
        """Return how many sequences hold the adapter now."""
        placed = self._placed.get(digest)
        return placed.users if placed else 0

    def finish_loading(self, digest: str) -> int:
        """Make a loading adapter resident and return its slot."""
        placed = self._loading(digest)
        placed.loading = False
        if placed.retired:
            self._free(digest)
        return placed.slot

    def abandon_loading(self, digest: str) -> int:
        """Give up a loading adapter, free its place and return its slot."""
        slot = self._loading(digest).slot
        self._free(digest)
        return slot

    def acquire(self, digest: str) -> int:
        """Count one more sequence on a resident adapter, and return its slot."""
        placed = self._placed.get(digest)
        if placed is None or placed.loading:
            raise ValueError(f"The adapter {digest[:12]} is not resident.")
        placed.users += 1
        self._touch(digest)
        return placed.slot

    def release(self, digest: str) -> None:
        """Count one sequence less; frees a retired adapter that nobody uses any more."""
        placed = self._placed.get(digest)
        if placed is None or placed.users == 0:
            raise ValueError(f"The adapter {digest[:12]} is not in use.")
        placed.users -= 1
        self._touch(digest)
        if placed.retired and not placed.users:
            self._free(digest)

    def protect(self, digests: frozenset[str]) -> None:
        """Evict none of these until the next call; it is no use of them."""
        self._protected = digests

    def pin(self, digest: str, pinned: bool) -> None:
        """Protect a placed adapter from eviction, or stop protecting it."""
        if digest not in self._placed:
            raise ValueError(f"The adapter {digest[:12]} has no slot.")
        self._placed[digest].pinned = pinned

    def retire(self, digest: str) -> None:
        """Free the adapter now, or when its last sequence or its loading ends; pins do not hold it.

        Unknown digests are ignored, so that whatever unloads a name need not ask what is resident.
        """
        placed = self._placed.get(digest)
        if placed is None:
            return
        placed.retired = True
        if not placed.users and not placed.loading:
            self._free(digest)

    def restore(self, digest: str) -> None:
        """Undo `retire` for an adapter that still is there because it was in use."""
        if digest in self._placed:
            self._placed[digest].retired = False

    def evict_idle(self) -> bool:
        """Evict the least recently used idle adapter; returns whether there was one."""
        victim = next(iter(self._idle()), None)
        if victim is not None:
            self._free(victim)
        return victim is not None

    def resident(self) -> tuple[str, ...]:
        """Return the digests of all resident adapters, least recently used first."""
        return tuple(digest for digest, placed in self._placed.items() if not placed.loading)

    def check_integrity(self) -> None:
        """Raise AssertionError when the bookkeeping contradicts itself."""
        assert self._free_slots == sorted(self._free_slots), "free slots are not in order"
        for digest, placed in self._placed.items():
            assert placed.users >= 0, f"{digest[:12]} has {placed.users} users"
            idle = placed.users == 0 and not placed.loading
            assert not (placed.retired and idle), f"{digest[:12]} is retired but not freed"

    def _idle(self) -> list[str]:
        """Return the adapters that may be evicted: first those that no request names, and of them
        the least recently used.
        """
        idle = (digest for digest, placed in self._placed.items() if placed.evictable)
        return sorted((one for one in idle if one not in self._protected), key=self.is_needed)

    def _first_idle(self) -> str | None:
        """Return the first of `_idle`, without a look at all adapters; None: there is none."""
        needed = None
        for digest, placed in self._placed.items():
            if placed.evictable and digest not in self._protected:
                if not self.is_needed(digest):
                    return digest
                needed = needed or digest
        return needed

    def _loading(self, digest: str) -> Placed[R]:
        placed = self._placed.get(digest)
        if placed is None or not placed.loading:
            raise ValueError(f"The adapter {digest[:12]} is not loading.")
        return placed

    def _touch(self, digest: str) -> None:
        self._placed[digest] = self._placed.pop(digest)

    def _free(self, digest: str) -> None:
        self._take_back(self._placed.pop(digest))

    def _return_slot(self, slot: int) -> None:
        self._free_slots = sorted([*self._free_slots, slot])
