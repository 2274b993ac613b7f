"""Rank rows written by the host straight into the pools, beside the device's programs.

A write through a program (`slots.write_rows`) carries a mebibyte and waits for its turn between two
steps. Where the host can copy into a device's arrays, whole matrices go there at the rate of its
bus instead, and only the table, which names them, is written by a program.
"""

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast, runtime_checkable

import jax
import numpy as np

from lora_jax.adapters.host_copier import HostCopier
from lora_jax.adapters.host_rows import as_one, follows
from lora_jax.adapters.host_table import HostTable
from lora_jax.adapters.lora_allocator import LoraPlacement, RowWrite
from lora_jax.adapters.lora_load_job import LoadFailed
from lora_jax.adapters.slots import AdapterSlots, clear_slots, fenced, publish
from lora_jax.adapters.weights import AdapterWeights, AnyWeights

CHUNK_BYTES = 128 << 20  # what counts as one chunk: to begin a copy costs next to nothing
_TROUBLE = (MemoryError, ValueError, OSError, RuntimeError)  # what a copier may raise


@runtime_checkable
class Copier(Protocol):
    """Part of memory.virtual.AbstractVirtualMemory that is used here."""

    def begin_write_into(self, array: jax.Array, offset: int, data: np.ndarray, /) -> None: ...

    def pin(self, data: np.ndarray, /) -> None: ...

    def writes_done(self) -> bool: ...

    def finish_writes(self) -> None: ...


def pin_matrices[W: AnyWeights](weights: W, copier: Copier | None) -> W:
    """Return the weights, whose matrices the host then copies at the rate of its bus.

    They lie in one block of memory, which is pinned whole, as small ones alone would not be, and
    in which those of one width follow each other, as their rows on the device mostly do: the host
    then copies many matrices at once.
    """
    if copier is None or not isinstance(weights, AdapterWeights):
        return weights
    packed = weights.in_one_block()
    first = next(packed.matrices(), None)
    if first is not None:
        copier.pin(first)  # and the block that all are views of
    return cast(W, packed)


class LoraCopyJob:
    """As LoraLoadJob, of which it has the methods, with rows that the host copies.

    Copies keep no order with programs. So none begins before every program that was enqueued before
    has ended, which may read rows that were another adapter's, and the table is written when all
    of them have arrived. Nobody waits for that: `advance` is to be called again. Several jobs may
    be under way, each for rows of its own. With a `table` the host writes that too, and no program
    is in a load.
    """

    def __init__(
        self,
        placement: LoraPlacement,
        slots: AdapterSlots,
        copier: Copier,
        *,
        is_first: bool = True,
        chunk_bytes: int | None = None,
        table: HostTable | None = None,
    ):
        """`slots` tells the shapes only. A later part of one placement is not the first.

        So many bytes count as one chunk, None: CHUNK_BYTES; no copy is larger.
        """
        self._placement, self._copier, self._table = placement, copier, table
        self._chunk_bytes = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
        sizes = {key: pool.dtype.itemsize for key, pool in slots.pools.items()}
        self._writes = collections.deque(
            (str(width), piece)
            for width, writes in sorted(placement.writes.items())
            for write in joined(writes)
            for piece in _pieces(write, self._chunk_bytes // (width * sizes[str(width)]))
        )
        self._bytes_left = sum(write.rows.size * sizes[key] for key, write in self._writes)
        self._waits, self._published = is_first, False
        self._failure: LoadFailed | None = None
        self._are_free: Callable[[], bool] | None = None  # nothing reads rows that are free now

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
        return self._chunks_left + (not self._published)

    @property
    def done(self) -> bool:
        return self._published

    def advance(self, slots: AdapterSlots, max_chunks: int) -> AdapterSlots:
        """Return `slots` (donated) with up to `max_chunks` more chunks begun.

        `remaining` stays as it is while programs that were enqueued before run, and while copies
        that were begun are on their way. After a copy that failed the next call raises LoadFailed:
        this one has donated the slots that it was given. No copy is then on its way, and what was
        written stays without use.
        """
        if self._failure is not None:
            raise self._failure
        if self.done or max_chunks < 1:
            return slots
        if self._waits:
            if self._are_free is None:
                slots, self._are_free = self._fence(slots)
            if not self._are_free():
                return slots
            if self._table is not None:
                self._table.clear(slots, self._placement.cleared_slots)
            self._waits = False
        try:
            if not self._copy(slots, max_chunks):
                return slots
        except _TROUBLE as error:
            with contextlib.suppress(*_TROUBLE):
                self._copier.finish_writes()  # its rows may be another's next
            self._failure = LoadFailed(str(error), may_pass=False)
            return slots
        self._published = True
        if self._table is None:
            return publish(slots, self._placement)
        self._table.publish(slots, self._placement)
        return slots

    def _fence(self, slots: AdapterSlots) -> tuple[AdapterSlots, Callable[[], bool]]:
        """Return `slots` (donated without a table), and what says that earlier programs ended."""
        if (table := self._table) is not None:
            count = table.dispatched
            return slots, lambda: table.has_read(count)
        slots, mark = fenced(clear_slots(slots, self._placement.cleared_slots))
        return slots, lambda: has_ended(mark)

    def _copy(self, slots: AdapterSlots, max_chunks: int) -> bool:
        """Begin up to `max_chunks` more chunks; return whether all rows have arrived."""
        before = self._chunks_left
        while self._writes and before - self._chunks_left < max_chunks:
            key, write = self._writes.popleft()
            pool = slots.pools[key]
            offset = write.offset * pool.shape[1] * pool.dtype.itemsize
            rows = write.rows
            if not isinstance(self._copier, HostCopier):  # which converts as it copies
                rows = rows.astype(pool.dtype, copy=False)
            self._copier.begin_write_into(pool, offset, rows)
            self._bytes_left -= rows.size * pool.dtype.itemsize
        if before - self._chunks_left >= max_chunks or not self._copier.writes_done():
            return False
        self._copier.finish_writes()
        return True

    @property
    def _chunks_left(self) -> int:
        return -(-self._bytes_left // self._chunk_bytes)


def joined(writes: Iterable[RowWrite]) -> Iterator[RowWrite]:
    """Yield the writes, as one where rows follow each other on the device and on the host alike."""
    begun: list[RowWrite] = []
    for write in writes:
        if begun and not _follows(begun[-1], write):
            yield _as_one(begun)
            begun = []
        begun.append(write)
    if begun:
        yield _as_one(begun)


def _pieces(write: RowWrite, most: int) -> Iterator[RowWrite]:
    """Yield a write in parts of up to so many rows, but at least of one."""
    most = max(1, most)
    for start in range(0, len(write.rows), most):
        yield RowWrite(write.offset + start, write.rows[start : start + most])


def _follows(first: RowWrite, then: RowWrite) -> bool:
    return first.offset + len(first.rows) == then.offset and follows(first.rows, then.rows)


def _as_one(writes: list[RowWrite]) -> RowWrite:
    """Return writes that follow each other as one."""
    if len(writes) == 1:
        return writes[0]
    return RowWrite(writes[0].offset, as_one([write.rows for write in writes]))


def has_ended(mark: Any) -> bool:
    """Return whether the program has ended that an array comes from; jax's stubs lack the call."""
    return mark.is_ready()
