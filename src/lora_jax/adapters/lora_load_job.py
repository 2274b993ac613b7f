"""Loading of a placed adapter into the slots: its writes in order, each of them plain data."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from lora_jax.adapters.lora_allocator import LoraPlacement, RowWrite
from lora_jax.adapters.slots import AdapterSlots, chunk_shape, empty_chunk, set_slot, written


class LoadFailed(RuntimeError):
    """A load cannot go on. `may_pass`: it may succeed when other adapters have left."""

    def __init__(self, why: str, *, may_pass: bool):
        super().__init__(why)
        self.may_pass = may_pass


@dataclasses.dataclass(frozen=True, eq=False)
class RowChunk:
    """A chunk of rank rows for one pool: of each device the same row indices, its own values."""

    pool: str
    indices: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class SlotEntry:
    """A slot's entries of the table; None empties it."""

    slot: int
    entries: np.ndarray | None = None
    scaling: np.ndarray | None = None
    token_ids: np.ndarray | None = None


def write(slots: AdapterSlots, what: RowChunk | SlotEntry) -> AdapterSlots:
    """Return `slots` (donated) with one write in them."""
    if isinstance(what, SlotEntry):
        return set_slot(slots, what.slot, what.entries, what.scaling, token_ids=what.token_ids)
    pools = dict(slots.pools)
    pools[what.pool] = written(pools[what.pool], what.indices, what.values)
    return dataclasses.replace(slots, pools=pools)


class LoraLoadJob:
    """The writes that bring one placed adapter onto the device, in chunks of fixed size.

    The table entry of the slot is the last write, so that a half-loaded adapter is never used;
    the entries of the placement's cleared slots become zero with the first.
    """

    def __init__(
        self,
        placement: LoraPlacement,
        slots: AdapterSlots,
        tell: Callable[[RowChunk | SlotEntry], None] = lambda what: None,
    ):
        """`slots` tells the shapes only; `tell` is given each write before it is done."""
        self._placement, self._tell = placement, tell
        self._pending = _chunks(placement, slots)
        sizes = {k: chunk_shape(pool)[0] for k, pool in slots.pools.items()}
        self._remaining = 1 + sum(
            -(-sum(len(write.rows) for write in writes) // sizes[str(width)])
            for width, writes in placement.writes.items()
        )
        self._started = False

    @property
    def digest(self) -> str:
        return self._placement.digest

    @property
    def slot(self) -> int:
        """The slot that it fills."""
        return self._placement.slot

    @property
    def remaining(self) -> int:
        """Chunks still to write, the table entry counted as one; 0 when the adapter is usable."""
        return self._remaining

    @property
    def done(self) -> bool:
        return self._remaining == 0

    def advance(self, slots: AdapterSlots, max_chunks: int) -> AdapterSlots:
        """Return `slots` (donated) with up to `max_chunks` more chunks written."""
        if self.done or max_chunks < 1:
            return slots
        if not self._started:
            self._started = True
            for cleared in self._placement.cleared_slots:
                slots = self._write(slots, SlotEntry(cleared))
        for _ in range(min(max_chunks, self._remaining - 1)):
            slots = self._write(slots, RowChunk(*next(self._pending)))
        self._remaining = max(0, self._remaining - max_chunks)
        if self._remaining == 0:
            placed = self._placement
            entry = SlotEntry(self.slot, placed.entries, placed.scaling, placed.token_ids)
            slots = self._write(slots, entry)
        return slots

    def _write(self, slots: AdapterSlots, what: RowChunk | SlotEntry) -> AdapterSlots:
        self._tell(what)
        return write(slots, what)


def _chunks(
    placement: LoraPlacement, slots: AdapterSlots
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield (pool key, indices, values) of every chunk, values in the pool's dtype."""
    for width, writes in sorted(placement.writes.items()):
        pool = slots.pools[str(width)]
        yield from ((str(width), *chunk) for chunk in _chunks_of(writes, pool))


def _chunks_of(
    writes: tuple[RowWrite, ...], pool: jax.Array
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    indices, values = empty_chunk(pool)
    used, size = 0, len(indices)
    for write in writes:
        done = 0
        while done < len(write.rows):
            count = min(size - used, len(write.rows) - done)
            first = write.offset + done
            indices[used : used + count] = np.arange(first, first + count, dtype=np.int32)
            rows = write.rows[done : done + count].astype(values.dtype)
            by_part = values.reshape(-1, size, values.shape[1])
            by_part[:, used : used + count] = rows.reshape(count, -1, rows.shape[-1]).swapaxes(0, 1)
            done, used = done + count, used + count
            if used == size:
                yield indices, values
                indices, values = empty_chunk(pool)
                used = 0
    if used:
        yield indices, values
