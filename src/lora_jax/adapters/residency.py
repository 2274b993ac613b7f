"""Which adapters are on the device: slots, and rank rows of each width at their true ranks. No jax.

The key is the digest of the files, not the name: a reload of other weights under the same name is
another adapter here, so that requests admitted on the old weights finish on them.

Life of an adapter: `place` gives it a slot and rows, it is loading; `finish_loading` makes it
resident; `acquire` and `release` count the sequences that use it; while it is loading, pinned or
in use it is never evicted; an idle one is evicted, least recently used first, when another
adapter needs its place. `retire` frees it as soon as nobody uses it (unload, reload).
"""

import dataclasses

import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.row_ranges import RowRanges
from lora_jax.adapters.weights import AdapterWeights


@dataclasses.dataclass(frozen=True, eq=False)
class RowWrite:
    """Rows [offset, offset + len(rows)) of the pool of this width get `rows` [n, width]."""

    offset: int
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where an adapter goes, and everything to write for it.

    `entries` is int32 [modules, layers, 5] with the columns of `AdapterSlots.entries`, `scaling`
    float32 [modules, layers]. `cleared_slots` are free now: their table entries are to be zeroed.
    """

    digest: str
    slot: int
    entries: np.ndarray
    scaling: np.ndarray
    writes: dict[int, tuple[RowWrite, ...]]  # by width
    evicted: tuple[str, ...] = ()  # digests of the adapters that had to go
    cleared_slots: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ResidencyStats:
    """How full the device's adapter slots are."""

    slots_used: int
    slots_total: int
    rows_used: dict[int, int]  # by width
    rows_total: dict[int, int]
    bytes_used: int
    bytes_total: int


@dataclasses.dataclass(eq=False)
class _Placed:
    """One adapter that owns a slot and rows."""

    slot: int
    ranges: tuple[tuple[int, int, int], ...]  # (width, start, length) of each matrix
    pinned: bool
    loading: bool = True
    retired: bool = False
    users: int = 0

    @property
    def evictable(self) -> bool:
        return not (self.users or self.pinned or self.loading)


class SlotAllocator:
    """Host bookkeeping of adapter slots; one thread (the engine's) uses it."""

    def __init__(
        self, catalogue: LoraCatalogue, num_slots: int, rows: dict[int, int], itemsize: int = 4
    ):
        """`rows` is the size of each width's pool (SlotsSpec.rows), `itemsize` of a pool value."""
        if num_slots < 1:
            raise ValueError(f"Adapters need at least 1 slot, not {num_slots}.")
        self._modules = {name: i for i, name in enumerate(catalogue.module_names)}
        self._num_layers = catalogue.num_layers
        self._num_slots = num_slots
        self._itemsize = itemsize
        self._pools = {width: RowRanges(count) for width, count in sorted(rows.items())}
        self._free_slots = list(range(num_slots))
        self._cleared_slots: set[int] = set()
        self._placed: dict[str, _Placed] = {}  # least recently used first

    def slot_of(self, digest: str) -> int | None:
        """Return the slot of a resident adapter (all rows on the device), else None."""
        placed = self._placed.get(digest)
        return placed.slot if placed and not placed.loading else None

    def is_loading(self, digest: str) -> bool:
        """Return whether the adapter has a place but not yet all its rows."""
        placed = self._placed.get(digest)
        return placed is not None and placed.loading

    def users(self, digest: str) -> int:
        """Return how many sequences hold the adapter now."""
        placed = self._placed.get(digest)
        return placed.users if placed else 0

    def check_fits(self, weights: AdapterWeights) -> None:
        """Raise ValueError when the adapter would not fit even on an empty device."""
        for width, need in sorted(weights.rows_by_width().items()):
            total = self._pools[width].total if width in self._pools else 0
            if need > total:
                raise ValueError(
                    f"The adapter needs {need} rank rows of width {width}; the device has {total}."
                )

    def can_place(self, weights: AdapterWeights) -> bool:
        """Return whether `place` would succeed now. Changes nothing."""
        return weights.digest not in self._placed and self._victims(weights) is not None

    def place(self, weights: AdapterWeights, *, pinned: bool = False) -> Placement:
        """Give the adapter a slot and rows, evicting idle ones as needed; it is then loading.

        Raises ValueError when it is already placed or cannot be placed now (see can_place), and
        then changes nothing.
        """
        digest = weights.digest
        if digest in self._placed:
            raise ValueError(f"The adapter {digest[:12]} has a slot already.")
        victims = self._victims(weights)
        if victims is None:
            raise ValueError(f"There is no room for the adapter {digest[:12]} now.")
        for victim in victims:
            self._free(victim)
        starts = [self._take(width, length) for width, length in weights.demand]
        ranges = tuple((w, s, n) for (w, n), s in zip(weights.demand, starts, strict=True))
        slot = self._free_slots.pop(0)
        self._cleared_slots.discard(slot)
        self._placed[digest] = _Placed(slot=slot, ranges=ranges, pinned=pinned)
        entries, scaling = self._table(weights, starts)
        return Placement(
            digest=digest,
            slot=slot,
            entries=entries,
            scaling=scaling,
            writes=_row_writes(weights, starts),
            evicted=victims,
            cleared_slots=self.take_cleared_slots(),
        )

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

    def take_cleared_slots(self) -> tuple[int, ...]:
        """Return, once, the slots freed since the last call and still free: zero their entries."""
        cleared = tuple(sorted(self._cleared_slots))
        self._cleared_slots.clear()
        return cleared

    def resident(self) -> tuple[str, ...]:
        """Return the digests of all resident adapters, least recently used first."""
        return tuple(digest for digest, placed in self._placed.items() if not placed.loading)

    def stats(self) -> ResidencyStats:
        """Return slots, rows and bytes in use and in total."""
        total = {width: pool.total for width, pool in self._pools.items()}
        used = {width: pool.total - pool.num_free for width, pool in self._pools.items()}
        return ResidencyStats(
            slots_used=len(self._placed),
            slots_total=self._num_slots,
            rows_used=used,
            rows_total=total,
            bytes_used=sum(w * n for w, n in used.items()) * self._itemsize,
            bytes_total=sum(w * n for w, n in total.items()) * self._itemsize,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the bookkeeping contradicts itself."""
        slots = [placed.slot for placed in self._placed.values()]
        assert sorted(slots + self._free_slots) == list(range(self._num_slots)), "slots overlap"
        assert self._free_slots == sorted(self._free_slots), "free slots are not in order"
        assert self._cleared_slots <= set(self._free_slots), "a slot in use would be zeroed"
        for width, pool in self._pools.items():
            held = [r[1:] for p in self._placed.values() for r in p.ranges if r[0] == width]
            end = 0
            for start, length in sorted([*held, *pool.ranges]):
                assert start == end, f"rows {end}..{start} of width {width} overlap or are lost"
                end = start + length
            assert end == pool.total, f"rows after {end} of width {width} are lost"
        for digest, placed in self._placed.items():
            assert placed.users >= 0, f"{digest[:12]} has {placed.users} users"
            idle = placed.users == 0 and not placed.loading
            assert not (placed.retired and idle), f"{digest[:12]} is retired but not freed"

    def _loading(self, digest: str) -> _Placed:
        placed = self._placed.get(digest)
        if placed is None or not placed.loading:
            raise ValueError(f"The adapter {digest[:12]} is not loading.")
        return placed

    def _touch(self, digest: str) -> None:
        self._placed[digest] = self._placed.pop(digest)

    def _take(self, width: int, length: int) -> int:
        start = self._pools[width].take(length)
        assert start is not None, "the trial allocation found room that is not there"
        return start

    def _free(self, digest: str) -> None:
        placed = self._placed.pop(digest)
        for width, start, length in placed.ranges:
            self._pools[width].give(start, length)
        self._free_slots = sorted([*self._free_slots, placed.slot])
        self._cleared_slots.add(placed.slot)

    def _victims(self, weights: AdapterWeights) -> tuple[str, ...] | None:
        """Return the least recently used idle adapters whose going makes room; None: no room."""
        need = weights.rows_by_width()
        if any(width not in self._pools for width in need):
            return None
        trial = {width: self._pools[width].copy() for width in need}
        idle = [digest for digest, placed in self._placed.items() if placed.evictable]
        num_victims = 0 if self._free_slots else 1
        for count in range(len(idle) + 1):
            if count:
                for width, start, length in self._placed[idle[count - 1]].ranges:
                    if width in trial:
                        trial[width].give(start, length)
            if count >= num_victims and _fits(trial, need, weights.demand):
                return tuple(idle[:count])
        return None

    def _table(self, weights: AdapterWeights, starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the slot's entries and scaling, given where each distinct matrix starts."""
        offsets = {id(m): s for m, s in zip(weights.matrices(), starts, strict=True)}
        shape = (len(self._modules), self._num_layers)
        entries, scaling = np.zeros((*shape, 5), np.int32), np.zeros(shape, np.float32)
        for (module, layer), site in weights.sites.items():
            at = self._modules[module], layer
            strides = [site.rank if m.shape[0] > 1 else 0 for m in (site.a, site.b)]
            entries[at] = (offsets[id(site.a)], offsets[id(site.b)], site.rank, *strides)
            scaling[at] = site.scaling
        return entries, scaling


def _fits(
    trial: dict[int, RowRanges], need: dict[int, int], demand: tuple[tuple[int, int], ...]
) -> bool:
    """Return whether all matrices fit into the free ranges, each contiguous."""
    if any(trial[width].num_free < count for width, count in need.items()):
        return False
    pools = {width: pool.copy() for width, pool in trial.items()}
    return all(pools[width].take(length) is not None for width, length in demand)


def _row_writes(weights: AdapterWeights, starts: list[int]) -> dict[int, tuple[RowWrite, ...]]:
    writes: dict[int, list[RowWrite]] = {}
    for matrix, start in zip(weights.matrices(), starts, strict=True):
        width = matrix.shape[2]
        writes.setdefault(width, []).append(RowWrite(start, matrix.reshape(-1, width)))
    return {width: tuple(rows) for width, rows in writes.items()}
