"""Physical pages of one size: counted, reused and kept within a budget. No jax.

ExpertWeave, section 4.2, "Memory Pool and Mapping": evicted adapters give their pages back to the
pool, which serves the next adapters from them.
"""

import dataclasses
import threading

from lora_jax.memory.virtual import AbstractVirtualMemory, OutOfPages


@dataclasses.dataclass(frozen=True, eq=False)
class Page:
    """A physical page of a pool, by the memory's handle; equal to itself alone."""

    handle: int


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """Pages of a pool; `budget` is the most it may create, `peak` the most ever in use."""

    created: int
    in_use: int
    free: int
    peak: int
    budget: int
    page_bytes: int


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
        """Create `prefill_pages` pages at once, so that the first loads need not.

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
        self._free: list[Page] = []
        self._counts: dict[Page, int] = {}  # page in use -> references
        self._peak = 0
        self._free += self._create(prefill_pages)

    def acquire(self, count: int) -> list[Page]:
        """Return `count` pages with one reference each: all of them, or OutOfPages and none."""
        if count < 0:
            raise ValueError(f"cannot acquire {count} pages")
        with self._lock:
            fresh = self._create(max(0, count - len(self._free)))
            kept = len(self._free) - (count - len(fresh))
            pages = fresh + self._free[kept:]
            del self._free[kept:]
            self._counts.update(dict.fromkeys(pages, 1))
            self._peak = max(self._peak, len(self._counts))
            return pages

    def retain(self, page: Page) -> None:
        """Add a reference to a page in use."""
        with self._lock:
            self._check_in_use(page)
            self._counts[page] += 1

    def release(self, page: Page) -> None:
        """Drop a reference; the last one makes the page free for the next `acquire`."""
        with self._lock:
            self._check_in_use(page)
            self._counts[page] -= 1
            if not self._counts[page]:
                del self._counts[page]
                self._free.append(page)

    def trim(self) -> int:
        """Destroy all free pages; return the bytes given back to the device."""
        with self._lock:
            before = len(self._free)
            while self._free:
                self.memory.destroy_page(self._free[-1].handle)
                self._free.pop()
            return before * self.page_bytes

    def stats(self) -> PoolStats:
        """Return the counts of this moment, in pages."""
        with self._lock:
            used, free = len(self._counts), len(self._free)
            return PoolStats(used + free, used, free, self._peak, self._budget, self.page_bytes)

    def check_integrity(self) -> None:
        """Assert that a page is either free or in use, once, and that the budget holds."""
        with self._lock:
            free = set(self._free)
            assert len(free) == len(self._free), "a page is free twice"
            assert not free & self._counts.keys(), "a page is free and in use"
            assert all(count > 0 for count in self._counts.values()), "a page without a reference"
            assert len(free) + len(self._counts) <= self._budget, "more pages than the budget"
            assert len(self._counts) <= self._peak, "more pages than the peak"

    def _create(self, count: int) -> list[Page]:
        """Return new pages; where one cannot be had, destroy the others again."""
        total = len(self._free) + len(self._counts) + count
        if total > self._budget:
            raise OutOfPages(
                f"{count} more pages of {self.page_bytes} bytes would make {total}; the budget "
                f"is {self._budget}, {len(self._counts)} are in use"
            )
        pages: list[Page] = []
        try:
            while len(pages) < count:
                pages.append(Page(self.memory.create_page(self.page_bytes)))
        except BaseException:
            for page in pages:
                self.memory.destroy_page(page.handle)
            raise
        return pages

    def _check_in_use(self, page: Page) -> None:
        if page not in self._counts:
            raise ValueError(f"page {page.handle} is not in use")
