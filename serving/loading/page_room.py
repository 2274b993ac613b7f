"""One pool of pages below KV and rank rows: what leaves goes when no step in flight reads it.

Memory is mapped, written and unmapped by the host, not in the order of the device's steps. So rows
are written only where nothing lies, the table names them when all are there, and what leaves keeps
its memory until every step that was dispatched before has been read back.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from lora_jax.adapters.allocator import Placed
from lora_jax.adapters.lora_allocator import LoraPlacement, Rows
from lora_jax.adapters.lora_load_job import LoadFailed
from lora_jax.adapters.row_copies import joined
from lora_jax.adapters.slots import AdapterSlots, clear_slots, publish
from lora_jax.memory.pool import PagePool
from lora_jax.memory.retirement import Retirement
from lora_jax.memory.virtual import OutOfPages
from lora_jax.pooled import PooledPages, PooledRows
from serving.loading.pooled_allocator import PooledSlotAllocator

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20  # of a copy that the engine's thread makes itself
_TROUBLE = (MemoryError, ValueError, OSError, RuntimeError)  # what a virtual memory may raise


class PageRoom:
    """Memory of KV pages and rank rows over one pool; the engine's thread uses it."""

    def __init__(self, pool: PagePool, pages: PooledPages, rows: PooledRows):
        self.pool, self.pages, self.rows = pool, pages, rows
        self._allocator: PooledSlotAllocator | None = None
        self.mapped_pages: Callable[[], Iterable[int]] = lambda: ()  # as KV's books have them
        self._retirement = Retirement()
        self._left: list[Callable[[], None]] = []  # since the last look
        self._left_slots: list[int] = []  # likewise

    # Memory, as scheduling.pages.extents.ExtentMemory and pooled_allocator.RowMemory say.

    def map_pages(self, pages: range) -> bool:
        """Give KV pages memory: all of them, or False and none."""
        return _done(lambda: self.pages.map(pages))

    def leave_pages(self, pages: range, then: Callable[[], None]) -> None:
        """Take the memory of KV pages when no step in flight reads them, and call `then`."""

        def free() -> None:
            self.pages.unmap(pages)
            then()

        self._left.append(free)

    def num_missing(self, rows: Rows) -> int:
        """Return how many pages `map_rows` would take."""
        return self.rows.num_missing(rows)

    def most_pages(self, rows: dict[int, int]) -> int:
        """Return the most pages that so many rows of each width take, wherever they lie."""
        return self.rows.most_pages(rows)

    def map_rows(self, rows: Rows) -> bool:
        """Give rank rows memory: all of them, or False and none."""
        return _done(lambda: self.rows.map(rows))

    def leave_rows(self, placed: Placed[Rows], *, mapped: bool) -> None:
        """Take an adapter's memory when no step in flight reads it; then `reclaim` follows."""

        def free() -> None:
            if mapped:
                self.rows.unmap(placed.room)
            self._books.reclaim(placed)

        self._left.append(free)
        self._left_slots.append(placed.slot)

    # The engine's side.

    def take_left_slots(self) -> tuple[int, ...]:
        """Return, once, the slots of adapters that have left, whose rows lose their memory soon.

        A program that masks rows afterwards must not find them in the table: where holes may not be
        read, empty these slots before `collect`.
        """
        left, self._left_slots = tuple(self._left_slots), []
        return left if self.rows.overrun else ()

    def jobs(
        self, allocator: PooledSlotAllocator, chunk_bytes: int = CHUNK_BYTES
    ) -> Callable[..., "PooledLoadJob"]:
        """Return what makes the load of an adapter that this allocator has placed."""
        self._allocator = allocator
        return lambda placement, slots: PooledLoadJob(
            placement, self.rows, allocator, chunk_bytes=chunk_bytes
        )

    @property
    def _books(self) -> PooledSlotAllocator:
        assert self._allocator is not None, "no adapter could have been placed"
        return self._allocator

    def finish_clears(self) -> None:
        """Return when memory that came is zeros, where kernels need that; before each program."""
        self.pool.memory.finish_clears()

    def collect(self, dispatched: int, read: int) -> int:
        """Free what no step can read any more; return how much of what left has gone by it.

        `dispatched` steps have been sent to the device so far, the results of `read` have come
        back.
        """
        left, self._left = self._left, []
        gone = sum(self._retirement.defer(dispatched - 1, free) for free in left)
        return gone + self._retirement.completed(read - 1)

    def spent(self, seconds: float) -> None:
        """Note how long the engine's thread was busy with loads and with what left for them."""
        if self._allocator is not None:
            self._allocator.spent(seconds)

    @property
    def is_short(self) -> bool:
        """True if somebody waits for pages, which are then not for adapters that nobody needs."""
        return self._books.is_short

    @property
    def is_busy(self) -> bool:
        """True if anything waits to be freed."""
        return bool(self._left or self._retirement.num_waiting)

    def rest(self) -> None:
        """Give the device the pages back that nothing lies on."""
        self.finish_clears()
        if self.pool.stats().free:
            self.pool.trim()

    def check_integrity(self) -> None:
        """Raise AssertionError when memory and books disagree while nothing runs."""
        self.pool.check_integrity()
        self.rows.check_integrity(self._books.mapped)
        self.pages.check_integrity(self.mapped_pages())

    def close(self) -> None:
        """Give all memory back; nothing may run on the device any more."""
        self.pages.close()
        self.rows.close()
        self.pool.trim()


class PooledLoadJob:
    """The writes that bring one placed adapter into rows that nothing reads; the table is last."""

    def __init__(
        self,
        placement: LoraPlacement,
        rows: PooledRows,
        allocator: PooledSlotAllocator,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        """The allocator says whether the rows have memory; so many bytes count as one chunk."""
        self._placement, self._rows, self._allocator = placement, rows, allocator
        self._chunk_bytes = chunk_bytes
        self._writes = deque(
            (width, write) for width, writes in placement.writes.items() for write in joined(writes)
        )
        self._bytes_left = sum(_nbytes(rows, write.rows) for _, write in self._writes)
        self._published = False

    @property
    def remaining(self) -> int:
        """Chunks still to write, the table entry counted as one; 0 when the adapter is usable."""
        return -(-self._bytes_left // self._chunk_bytes) + (not self._published)

    @property
    def done(self) -> bool:
        return self._published

    def advance(self, slots: AdapterSlots, max_chunks: int) -> AdapterSlots:
        """Return `slots`, whose table is donated, with up to `max_chunks` more chunks written.

        Raises LoadFailed when there is no memory for the adapter.
        """
        if not self._allocator.has_memory(self._placement.digest):
            raise LoadFailed("the page pool has no memory for its rows", may_pass=True)
        if self._published or max_chunks < 1:
            return slots
        left = self._bytes_left - max_chunks * self._chunk_bytes
        try:
            while self._writes and self._bytes_left > left:
                width, write = self._writes.popleft()
                self._rows.begin_write(width, write.offset, write.rows)
                self._bytes_left -= _nbytes(self._rows, write.rows)
            if self._bytes_left or not self._rows.writes_done:
                return slots  # nobody waits for the bytes: the next call looks again
            self._rows.finish_writes()
        except _TROUBLE as error:
            # No byte may be on its way to rows that lose their memory next.
            with contextlib.suppress(*_TROUBLE):
                self._rows.finish_writes()
            raise LoadFailed(str(error), may_pass=False) from error
        self._published = True
        return publish(clear_slots(slots, self._placement.cleared_slots), self._placement)


def _nbytes(rows: PooledRows, values: np.ndarray) -> int:
    return values.size * rows.dtype.itemsize


def _done(action: Callable[[], None]) -> bool:
    """Return whether there was memory for it."""
    try:
        action()
    except OutOfPages as error:
        logger.warning("The page pool has no memory: %s", error)
        return False
    return True
