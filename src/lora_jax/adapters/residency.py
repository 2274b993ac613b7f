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
from lora_jax.adapters.weights import AdapterWeights


@dataclasses.dataclass(frozen=True, eq=False)
class RowWrite:
    """Rows [offset, offset + len(rows)) of the pool of this width get `rows` [n, width]."""

    offset: int
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where an adapter goes, and everything to write for it; `evicted` slots are now empty.

    `entries` is int32 [modules, layers, 5] with the columns of `AdapterSlots.entries`, `scaling`
    float32 [modules, layers].
    """

    digest: str
    slot: int
    entries: np.ndarray
    scaling: np.ndarray
    writes: dict[int, tuple[RowWrite, ...]]  # by width
    evicted: tuple[str, ...] = ()  # digests
    evicted_slots: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ResidencyStats:
    """How full the device's adapter slots are."""

    slots_used: int
    slots_total: int
    rows_used: dict[int, int]  # by width
    rows_total: dict[int, int]
    bytes_used: int
    bytes_total: int


class SlotAllocator:
    """Host bookkeeping of adapter slots; one thread (the engine's) uses it."""

    def __init__(
        self, catalogue: LoraCatalogue, num_slots: int, rows: dict[int, int], itemsize: int = 4
    ):
        """`rows` is the size of each width's pool (SlotsSpec.rows), `itemsize` of a pool value."""
        raise NotImplementedError

    def slot_of(self, digest: str) -> int | None:
        """Return the slot of a resident adapter (all rows on the device), else None."""
        raise NotImplementedError

    def is_loading(self, digest: str) -> bool:
        """Return whether the adapter has a place but not yet all its rows."""
        raise NotImplementedError

    def can_place(self, weights: AdapterWeights) -> bool:
        """Return whether `place` would succeed now. Changes nothing."""
        raise NotImplementedError

    def place(self, weights: AdapterWeights, *, pinned: bool = False) -> Placement:
        """Give the adapter a slot and rows, evicting idle ones as needed; it is then loading.

        Raises ValueError when it is already placed or cannot be placed now (see can_place), and
        then changes nothing.
        """
        raise NotImplementedError

    def finish_loading(self, digest: str) -> int:
        """Make a loading adapter resident and return its slot."""
        raise NotImplementedError

    def abandon_loading(self, digest: str) -> int:
        """Give up a loading adapter, free its place and return its slot."""
        raise NotImplementedError

    def acquire(self, digest: str) -> int:
        """Count one more sequence on a resident adapter, and return its slot."""
        raise NotImplementedError

    def release(self, digest: str) -> None:
        """Count one sequence less; frees a retired adapter that nobody uses any more."""
        raise NotImplementedError

    def pin(self, digest: str, pinned: bool) -> None:
        """Protect a placed adapter from eviction, or stop protecting it."""
        raise NotImplementedError

    def retire(self, digest: str) -> None:
        """Free the adapter now, or when its last sequence ends. Unknown digests are ignored."""
        raise NotImplementedError

    def resident(self) -> tuple[str, ...]:
        """Return the digests of all resident adapters, least recently used first."""
        raise NotImplementedError

    def stats(self) -> ResidencyStats:
        """Return slots, rows and bytes in use and in total."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise AssertionError when the bookkeeping contradicts itself."""
        raise NotImplementedError
