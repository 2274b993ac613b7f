"""Physical pages of one size: counted, reused and kept within a budget. No jax.

ExpertWeave, section 4.2, "Memory Pool and Mapping": evicted adapters give their pages back to the
pool, which serves the next adapters from them. Pages that come and go together may be one block,
for a driver takes as long for a handle of many pages as for one of a single page.
"""

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence

from lora_jax.memory.virtual import AbstractVirtualMemory, OutOfPages


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Pages of a pool behind one handle of the memory, mapped together; equal to itself alone."""

    handle: int
    num_pages: int


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """Pages of a pool; `budget` is the most it may create, `peak` the most ever in use."""

    created: int
    in_use: int
    free: int
    peak: int
    budget: int
    page_bytes: int


class _FreeBlocks:
    """Blocks that nobody uses, by their size: what a load asks for is found at once among many."""

    def __init__(self):
        self._by_size: dict[int, list[Block]] = {}  # no list is empty
        self.num_pages = 0

    def __iter__(self) -> Iterator[Block]:
        return (block for blocks in self._by_size.values() for block in blocks)

    def put_all(self, blocks: Iterable[Block]) -> None:
        """Add blocks."""
        for block in blocks:
            self._by_size.setdefault(block.num_pages, []).append(block)
            self.num_pages += block.num_pages

    def take(self, size: int) -> Block | None:
        """Take out the block of so many pages that was added last; None if there is none."""
        return self._pop(size) if size in self._by_size else None

    def take_any(self) -> Block:
        """Take out a block; there must be one."""
        return self._pop(next(reversed(self._by_size)))

    def _pop(self, size: int) -> Block:
        blocks = self._by_size[size]
        block = blocks.pop()
        if not blocks:
            del self._by_size[size]
        self.num_pages -= size
        return block


class PagePool:
    """Pages of `page_bytes` from `memory`, at most `budget_bytes` of them; safe for threads."""

    def __init__(
        self,
        memory: AbstractVirtualMemory,
        *,
        page_bytes: int,
        budget_bytes: int,
        prefill_pages: int = 0,
    ):
        """Create `prefill_pages` single pages at once, so that the first loads need not.

        Raises:
            ValueError: a page size that the memory cannot map, or a prefill above the budget.
            OutOfPages: the prefill does not fit.
        """
        if page_bytes <= 0 or page_bytes % memory.granularity:
            raise ValueError(
                f"page_bytes {page_bytes} is not a positive multiple of {memory.granularity}"
            )
        if not 0 <= prefill_pages <= budget_bytes // page_bytes:
            raise ValueError(
                f"prefill_pages {prefill_pages} of {page_bytes} bytes do not fit the budget of "
                f"{budget_bytes} bytes"
            )
        self.memory = memory
        self.page_bytes = page_bytes
        self._budget = budget_bytes // page_bytes
        self._lock = threading.Lock()
        self._free = _FreeBlocks()
        self._used: set[Block] = set()
        self._created = self._in_use = self._peak = 0  # pages
        self._free.put_all(self._create([1] * prefill_pages))

    def acquire(self, sizes: Sequence[int]) -> list[Block]:
        """Return blocks of so many pages: all of them, or none.

        Free blocks of these sizes are used again; free ones of others go where they are in the way.

        Raises:
            ValueError: a block without pages.
            OutOfPages: the budget or the memory has no room.
        """
        if min(sizes, default=1) < 1:
            raise ValueError(f"cannot acquire blocks of {list(sizes)} pages")
        with self._lock:
            reused = [self._free.take(size) for size in sizes]
            missing = [size for size, block in zip(sizes, reused, strict=True) if block is None]
            try:
                fresh = iter(self._create(missing))
            except BaseException:
                self._free.put_all(filter(None, reused))
                raise
            blocks = [block or next(fresh) for block in reused]
            self._used.update(blocks)
            self._in_use += sum(sizes)
            self._peak = max(self._peak, self._in_use)
            return blocks

    @property
    def num_pages(self) -> int:
        """The most pages that there may be."""
        return self._budget

    @property
    def num_available(self) -> int:
        """Pages that `acquire` could give now, as far as the budget goes."""
        return self._budget - self._in_use

    def release(self, block: Block) -> None:
        """Make a block in use free for the next `acquire`; ValueError for one that is not."""
        with self._lock:
            if block not in self._used:
                raise ValueError(f"block {block.handle} is not in use")
            self._used.remove(block)
            self._in_use -= block.num_pages
            self._free.put_all([block])

    def trim(self) -> int:
        """Destroy all free blocks; return the bytes given back to the device."""
        with self._lock:
            return self._destroy_free(self._created) * self.page_bytes

    def stats(self) -> PoolStats:
        """Return the counts of this moment, in pages."""
        with self._lock:
            counts = self._created, self._in_use, self._created - self._in_use, self._peak
            return PoolStats(*counts, self._budget, self.page_bytes)

    def check_integrity(self) -> None:
        """Assert that a block is either free or in use, once, and that the budget holds."""
        with self._lock:
            listed = list(self._free)
            free = set(listed)
            assert len(free) == len(listed), "a block is free twice"
            assert _pages(free) == self._free.num_pages, "free pages are not so many"
            assert not free & self._used, "a block is free and in use"
            assert _pages(self._used) == self._in_use <= self._peak, "pages in use are not so many"
            assert _pages(free) + self._in_use == self._created, "pages that are not accounted for"
            assert self._created <= self._budget, "more pages than the budget"

    def _create(self, sizes: Sequence[int]) -> list[Block]:
        """Return new blocks; where one cannot be had, destroy the others again."""
        too_many = self._created + sum(sizes) - self._budget
        if too_many > 0 and too_many > (free := self._free.num_pages):
            raise OutOfPages(
                f"{sum(sizes)} more pages of {self.page_bytes} bytes are {too_many - free} too "
                f"many; the budget is {self._budget}, {self._in_use} are in use"
            )
        self._destroy_free(too_many)
        blocks: list[Block] = []
        try:
            for size in sizes:
                blocks.append(Block(self._create_pages(size), size))
                self._created += size
        except BaseException:
            for block in blocks:
                self._destroy(block)
            raise
        return blocks

    def _create_pages(self, count: int) -> int:
        """Return a handle of so many pages; free blocks make room for it on a full device."""
        try:
            return self.memory.create_page(count * self.page_bytes)
        except OutOfPages:
            if not self._destroy_free(self._created):
                raise
        return self.memory.create_page(count * self.page_bytes)

    def _destroy_free(self, count: int) -> int:
        """Destroy free blocks until so many pages are gone, or all; return how many are."""
        gone = 0
        while self._free.num_pages and gone < count:
            block = self._free.take_any()
            try:
                self._destroy(block)
            except BaseException:
                self._free.put_all([block])
                raise
            gone += block.num_pages
        return gone

    def _destroy(self, block: Block) -> None:
        self.memory.destroy_page(block.handle)
        self._created -= block.num_pages


def _pages(blocks: Iterable[Block]) -> int:
    return sum(block.num_pages for block in blocks)
