"""Allocator of LoRA adapters on the device: slots, and rank rows of each width. No jax.

See `allocator` for the life of an adapter.
"""

import dataclasses

import numpy as np

from lora_jax.adapters import vocabulary
from lora_jax.adapters.allocator import AbstractAllocator, Placed, ResidencyStats
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.row_ranges import RowRanges, fits, runs_of, take_all
from lora_jax.adapters.weights import AdapterWeights, SiteColumns
from lora_jax.rank_rows import rows_nbytes

_MOST_FORMS = 64  # of tables; adapters that were trained alike have one


@dataclasses.dataclass(frozen=True, eq=False)
class RowWrite:
    """Rows [offset, offset + len(rows)) of the pool of this width get `rows` [n, width].

    In a split model each device's rows there get their own of `rows` [n, devices, width].
    """

    offset: int
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class LoraPlacement:
    """Destination of an adapter, and everything to write for it.

    `entries` is int32 [modules, layers, 5] with the columns of `AdapterSlots.entries`, `scaling`
    float32 [modules, layers]. `cleared_slots` are free now: their table entries are to be zeroed.
    """

    digest: str
    slot: int
    entries: np.ndarray
    scaling: np.ndarray
    writes: dict[int, tuple[RowWrite, ...]]  # by width
    token_ids: np.ndarray  # int32 [2, tokens], as vocabulary.ids_table has them
    evicted: tuple[str, ...] = ()  # digests of the adapters that had to go
    cleared_slots: tuple[int, ...] = ()


Rows = tuple[tuple[int, int, int], ...]  # (width, start, length) of each run


@dataclasses.dataclass(frozen=True, eq=False)
class _TableForm:
    """A slot's table but for where matrices begin: `cells` says where those of `entries` are.

    `cells` are rows of `entries` as [modules * layers, 5].
    """

    entries: np.ndarray
    scaling: np.ndarray
    cells: np.ndarray


class SlotAllocator(AbstractAllocator[AdapterWeights, LoraPlacement, Rows]):
    """Host bookkeeping of LoRA slots and rank rows; one thread (the engine's) uses it."""

    def __init__(
        self, catalogue: LoraCatalogue, num_slots: int, rows: dict[int, int], itemsize: int = 4
    ):
        """`rows` is the size of each width's pool (SlotsSpec.rows), `itemsize` of a pool value,
        1 in 8 bits."""
        super().__init__(num_slots)
        self._modules = {name: i for i, name in enumerate(catalogue.module_names)}
        self._num_layers = catalogue.num_layers
        self._itemsize = itemsize
        self._most_tokens = vocabulary.most_tokens(catalogue)
        self._pools = {width: RowRanges(count) for width, count in sorted(rows.items())}
        self._total = {width: pool.total for width, pool in self._pools.items()}
        self._bytes_total = rows_nbytes(self._total, itemsize)
        self._forms: dict[SiteColumns, _TableForm] = {}
        self._no_ids = vocabulary.ids_table({}, self._most_tokens)  # never written
        self._cleared_slots: set[int] = set()
        self.bringing: set[int] = set()  # slots of adapters with more than LoRA

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

    def has_room(self, weights: AdapterWeights) -> bool:
        if weights.digest in self._placed or not self._free_slots:
            return False
        for width, count in weights.rows_by_width().items():  # thousands may be asked about
            if width not in self._pools or self._pools[width].num_free < count:
                return False
        return fits(self._pools, weights.demand, weights.rows_by_width())

    def place(self, weights: AdapterWeights, *, pinned: bool = False) -> LoraPlacement:
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
        return self._place_after(victims, weights, pinned)

    def try_place(self, weights: AdapterWeights, *, pinned: bool = False) -> LoraPlacement | None:
        victims = None if weights.digest in self._placed else self._victims(weights)
        return None if victims is None else self._place_after(victims, weights, pinned)

    def _place_after(
        self, victims: tuple[str, ...], weights: AdapterWeights, pinned: bool
    ) -> LoraPlacement:
        """Evict the victims, which makes room, and give the adapter its place."""
        digest = weights.digest
        for victim in victims:
            self._free(victim)
        starts = take_all(self._pools, weights.demand, weights.rows_by_width())
        assert starts is not None, "the trial allocation found room that is not there"
        ranges = runs_of(weights.demand, starts)
        slot = self._free_slots.pop(0)
        self._cleared_slots.discard(slot)
        self._placed[digest] = Placed(slot, ranges, pinned)
        if weights.report.brings:
            self.bringing.add(slot)
        entries, scaling = self._table(weights, starts)
        return LoraPlacement(
            digest=digest,
            slot=slot,
            entries=entries,
            scaling=scaling,
            writes=_row_writes(weights, starts),
            token_ids=self._ids_table(weights),
            evicted=victims,
            cleared_slots=self.take_cleared_slots(),
        )

    def take_cleared_slots(self) -> tuple[int, ...]:
        """Return, once, the slots freed since the last call and still free: zero their entries."""
        cleared = tuple(sorted(self._cleared_slots))
        self._cleared_slots.clear()
        return cleared

    def stats(self) -> ResidencyStats:
        used = {width: pool.total - pool.num_free for width, pool in self._pools.items()}
        return ResidencyStats(
            slots_used=len(self._placed),
            slots_total=self.num_slots,
            rows_used=used,
            rows_total=self._total,
            bytes_used=rows_nbytes(used, self._itemsize),
            bytes_total=self._bytes_total,
        )

    def check_integrity(self) -> None:
        super().check_integrity()
        held = self._held()
        slots = [placed.slot for placed in held]
        assert sorted(slots + self._free_slots) == list(range(self.num_slots)), "slots overlap"
        assert self._cleared_slots <= set(self._free_slots), "a slot in use would be zeroed"
        for width, pool in self._pools.items():
            taken = [r[1:] for p in held for r in p.room if r[0] == width]
            end = 0
            for start, length in sorted([*taken, *pool.ranges]):
                assert start == end, f"rows {end}..{start} of width {width} overlap or are lost"
                end = start + length
            assert end == pool.total, f"rows after {end} of width {width} are lost"

    def _held(self) -> list[Placed[Rows]]:
        """Return the adapters that have a slot and rows."""
        return list(self._placed.values())

    def _take_back(self, placed: Placed[Rows]) -> None:
        for width, start, length in placed.room:
            self._pools[width].give(start, length)
        self._return_slot(placed.slot)
        self.bringing.discard(placed.slot)
        self._cleared_slots.add(placed.slot)

    def _victims(self, weights: AdapterWeights) -> tuple[str, ...] | None:
        """Return the least recently used idle adapters whose going makes room; None: no room."""
        need = weights.rows_by_width()
        if any(width not in self._pools for width in need):
            return None
        if self._free_slots:
            if fits(self._pools, weights.demand, need):
                return ()
        elif (first := self._first_idle()) is None:
            return None
        elif self._has_runs(first, need):  # as for adapters that were trained alike
            return (first,)
        idle = self._idle()
        trial = {width: self._pools[width].copy() for width in need}
        for count, digest in enumerate(idle, 1):
            for width, start, length in self._placed[digest].room:
                if width in trial:
                    trial[width].give(start, length)
            if fits(trial, weights.demand, need):
                return tuple(idle[:count])
        return None

    def _has_runs(self, digest: str, need: dict[int, int]) -> bool:
        """Return whether one run of a placed adapter is long enough for each width that is needed.

        Then its going makes room, whatever is free beside it.
        """
        room = self._placed[digest].room
        return all(
            any(run[0] == width and run[2] >= count for run in room)
            for width, count in need.items()
        )

    def _table(self, weights: AdapterWeights, starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the slot's entries and scaling, given where each distinct matrix starts."""
        form = self._form(weights.site_columns)
        entries = form.entries.copy()
        first = np.asarray(starts, np.int32)[weights.site_columns.matrices]
        entries.reshape(-1, 5)[form.cells, :2] = first
        return entries, form.scaling

    def _form(self, sites: SiteColumns) -> _TableForm:
        """Return the table of adapters with these sites; those of one layout share the object."""
        if (form := self._forms.get(sites)) is not None:
            return form
        shape = len(self._modules), self._num_layers
        entries, scaling = np.zeros((*shape, 5), np.int32), np.zeros(shape, np.float32)
        modules = np.array([self._modules[name] for name in sites.modules], np.intp)
        entries[modules, sites.layers, 2:] = sites.shapes
        scaling[modules, sites.layers] = sites.scaling
        scaling.flags.writeable = False  # all placements of the form have it
        if len(self._forms) >= _MOST_FORMS:
            del self._forms[next(iter(self._forms))]
        form = _TableForm(entries, scaling, modules * self._num_layers + sites.layers)
        self._forms[sites] = form
        return form

    def _ids_table(self, weights: AdapterWeights) -> np.ndarray:
        """Return the tokens whose rows the adapter brings."""
        if not weights.token_ids:
            return self._no_ids
        return vocabulary.ids_table(weights.token_ids, self._most_tokens)


def _row_writes(weights: AdapterWeights, starts: list[int]) -> dict[int, tuple[RowWrite, ...]]:
    """Return the writes by width: of matrices that follow each other on both sides as one."""
    writes: dict[int, list[RowWrite]] = {}
    for run in weights.host_runs:
        of_width, first, done = writes.setdefault(run.width, []), 0, 0
        begin = starts[run.numbers[0]]
        for number, count in zip(run.numbers, run.counts, strict=True):
            if done > first and starts[number] != begin + done - first:
                of_width.append(RowWrite(begin, run.rows[first:done]))
                first, begin = done, starts[number]
            done += count
        of_width.append(RowWrite(begin, run.rows[first:done]))
    return {width: tuple(rows) for width, rows in writes.items()}
