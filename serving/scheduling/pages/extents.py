"""KV pages that have memory: they come and go in extents of some consecutive pages. No jax."""

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Protocol

from serving.scheduling.pages.exchange import Offer, PageExchange, PoolShares
from serving.scheduling.pages.prefix_cache import PageCache

_MOST_WAITS = 4  # what leaves is free after two steps
_RESERVES = 2  # kept free: what left at once would come back at once
_MOST_USES = 2  # that count: what was asked for often before would stay long when nobody asks now
_CHANCE_SHARE = 1 / 64  # of a page that was matched, or left unmatched, in the chance of a match


class ExtentMemory(Protocol):
    """Memory below KV pages."""

    def map_pages(self, pages: range) -> bool:
        """Give pages memory: all of them, or False and none."""
        ...

    def leave_pages(self, pages: range, then: Callable[[], None]) -> None:
        """Take their memory when no step in flight reads them, and call `then`."""
        ...


class PageExtents:
    """The KV side of an exchange: extents of a page cache. The engine's thread uses it."""

    def __init__(
        self,
        cache: PageCache,
        exchange: PageExchange,
        memory: ExtentMemory,
        *,
        extent: int,
        extent_pages: int,
        least: int,
    ):
        """An extent is `extent` KV pages, which take `extent_pages` of the pool. All pages of the
        cache are absent; at least `least` of them have memory from now on, which is what the
        longest sequence takes.

        Raises ValueError when the pool has no room for them.
        """
        self._cache, self._exchange, self._memory = cache, exchange, memory
        self._size, self._extent_pages = extent, extent_pages
        self._least = -(-least // extent)
        count = cache.num_pages // extent
        self._absent = set(range(count))  # extents; the rest are present or leaving
        self._leaving: set[int] = set()
        self._idle: set[int] = set()  # present ones of which no page is held
        self._held = [0] * count  # pages of each
        self._blank: list[set[int]] = [set() for _ in range(count)]  # pages of each
        # Extents by their number of blank pages.
        self._by_blank: list[set[int]] = [set(range(count)), *(set() for _ in range(extent))]
        self._worth = [0.0] * count  # of what is cached on them
        self._tops = [0.0] * count  # of the pages of each that were matched, the highest value
        self._unsure = set(range(count))  # extents whose top is to be looked for again
        self._newest = [0] * count  # number of the page of each that was cached last
        self._uses = [0] * cache.num_pages
        self._values: dict[int, float] = {}  # of cached pages
        self._order: list[tuple[float, int, int]] = []  # heap of values, numbers, cached pages
        self._numbers = [0] * cache.num_pages  # of a page's entry in the order
        self._number = 0
        self._chance = 0.5  # that a page which was computed once is matched before it goes
        self._reserve = 0  # pages that sequences that run may need
        self._waits = 0  # since the last that had enough of it
        cache.watch = self
        exchange.join(self)
        while self.num_present < self._least:
            if not self._add():
                raise ValueError(
                    f"The page pool has no room for {least} KV pages, those of the longest "
                    "sequence: raise page_pool_bytes or lower max_model_len."
                )

    @property
    def num_present(self) -> int:
        """Extents that have memory and keep it."""
        return len(self._held) - len(self._absent) - len(self._leaving)

    @property
    def shares(self) -> PoolShares:
        """The shares of the pool now."""
        extents = len(self._held) - len(self._absent)
        return self._exchange.shares(extents * self._extent_pages)

    # The scheduler's side.

    def start_step(self, num_running: int, num_idle: int = 0, *, is_starving: bool = False) -> None:
        """See to it that each sequence that runs may grow by a page; the rest is the exchange's."""
        self._reserve = reserve = num_running
        self._exchange.start_step(num_running, num_idle, is_starving=is_starving)
        self.want(reserve, urgent=True)

    def want(self, count: int, *, urgent: bool = False) -> bool:
        """Have so many pages be blank: at once as far as the pool has room, else soon.

        Returns whether to wait for them: something leaves for their sake that is worth less than
        what is cached. Without that, cached pages are as good as blank ones.
        """
        missing = count - self._cache.num_blank
        if missing <= 0:
            return False
        below, is_cheap = math.inf, False
        if self._values and count <= self._cache.num_free:
            below, offer = self._values[self.least_cached()], self._exchange.least(self)
            others = self._exchange.pages_leaving - self.pages_leaving
            is_cheap = others or (offer is not None and offer.value < below)
            if self._exchange.is_short and not is_cheap:
                return False
        while missing > 0 and self._add():
            missing -= self._size
        if missing <= 0 or not self._absent:
            return False
        pages = -(-missing // self._size) * self._extent_pages
        if below < math.inf:
            self._waits = (self._waits + 1) % _MOST_WAITS
            if not is_cheap or not self._waits:  # others may have taken what left
                return False
        self._exchange.claim(pages, self, own=False, below=below, urgent=urgent)
        return self._exchange.pages_leaving > self.pages_leaving

    def planned(self, now: float) -> None:
        """Note that a step goes to the device."""
        self._exchange.planned(now)

    def completed(self, num_tokens: int, num_rows: int, now: float) -> None:
        """Note the end of the oldest step in flight, of so many tokens."""
        self._exchange.completed(num_tokens, num_rows, now)

    def matched(self, pages: Iterable[int]) -> None:
        """A sequence has been admitted whose prompt begins with what is on these pages."""
        for page in pages:
            if self._uses[page] == 1:
                self._chance += _CHANCE_SHARE * (1.0 - self._chance)
            self._uses[page] += 1

    # The cache's side.

    def taken(self, page: int, *, fresh: bool) -> None:
        """A page that was free is held; `fresh`: for other contents than it had."""
        extent = page // self._size
        self._idle.discard(extent)
        self._held[extent] += 1
        was_cached = page in self._values
        self._note_blank(page, is_blank=False)
        value = self._lose(page)
        if fresh:
            self._note_gone(page, was_cached)
            self._uses[page] = 1
            self._exchange.raise_level(value)

    def freed(self, page: int, *, cached: bool) -> None:
        """Nobody holds the page any more."""
        extent = page // self._size
        self._held[extent] -= 1
        if cached:
            self._values[page] = self._value(page)
            self._worth[extent] += self._values[page]
            if self._uses[page] > 1:
                self._tops[extent] = max(self._tops[extent], self._values[page])
            self._number += 1
            self._numbers[page] = self._newest[extent] = self._number
            heapq.heappush(self._order, (self._values[page], self._number, page))
            self._compact()
        else:
            self._note_blank(page, is_blank=True)
        if not self._held[extent]:
            self._idle.add(extent)

    def blanked(self, page: int) -> None:
        """A cached page is blank now, as a page that is held has the same contents."""
        self._lose(page)
        self._note_blank(page, is_blank=True)

    def places(self, count: int) -> list[int]:
        """Return the pages for a sequence's next ones: blank, and cached where these are too few.

        Pages of a long prompt lie together, in blank extents; few pages fill the gaps of others.
        So an extent that is given up takes the end of one prefix, and no other prefix's beginning,
        without which the rest of it is not found.
        """
        chosen: list[int] = []
        while (left := count - len(chosen)) and (extent := self._with_blank(left)) is not None:
            part = sorted(self._blank[extent])[:left]
            for page in part:
                self._note_blank(page, is_blank=False)
            chosen += part
        for _ in range(count - len(chosen)):
            chosen.append(self.least_cached())
            heapq.heappop(self._order)  # or it would be named twice
        return chosen

    def _with_blank(self, count: int) -> int | None:
        """Return the extent with fewest blank pages that are so many, else that with most."""
        enough = range(count, self._size + 1)
        fewer = range(min(count, self._size), 0, -1)
        number = next((n for n in (*enough, *fewer) if self._by_blank[n]), 0)
        return min(self._by_blank[number]) if number else None

    def _note_blank(self, page: int, *, is_blank: bool) -> None:
        """Note whether a page is blank."""
        extent = page // self._size
        pages = self._blank[extent]
        self._by_blank[len(pages)].discard(extent)
        (pages.add if is_blank else pages.discard)(page)
        self._by_blank[len(pages)].add(extent)

    def least_cached(self) -> int:
        """Return the cached page that is worth least, of equal ones the oldest; there is one."""
        while not self._stands(*self._order[0]):
            heapq.heappop(self._order)
        return self._order[0][2]

    # The exchange's side.

    @property
    def pages_leaving(self) -> int:
        """Pages of the pool that were given up and are not free yet."""
        return len(self._leaving) * self._extent_pages

    def offer(self) -> Offer | None:
        """Return the extent that is worth least of those that no sequence has a page of."""
        if self.num_present <= self._least or not self._idle:
            return None
        if self._cache.num_free - self._size < _RESERVES * self._reserve:
            return None
        extent = min(self._idle, key=self._rank)
        value = self._worth[extent] / self._size
        lost_s = sum(self._seconds(page) for page in self._pages(extent) if page in self._values)
        return Offer(value, self._extent_pages, lambda: self._give(extent), lost_s)

    def _rank(self, extent: int) -> tuple[float, int, int]:
        """Return what orders idle extents: worth, then age; of blank ones the last go first.

        The most valuable page counts for all, because what is behind it is lost with it: gaps that
        others' pages fill make the end of a prefix worth no less.
        """
        worth = self._top(extent) or self._worth[extent] / self._size
        return worth, self._newest[extent] if worth else 0, -extent

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict the cache."""
        absent = self._absent | self._leaving
        assert not self._absent & self._leaving, "an extent has left twice"
        assert not self._idle & absent, "an extent without memory is idle"
        for extent in range(len(self._held)):
            pages = self._pages(extent)
            held = sum(self._cache.is_held(page) for page in pages)
            assert self._held[extent] == held, f"extent {extent}: {held} pages are held"
            assert (extent in self._idle) == (not held and extent not in absent)
            blank = {page for page in pages if self._cache.is_blank(page)}
            assert self._blank[extent] == blank, f"blank pages of extent {extent}"
            assert extent in self._by_blank[len(blank)], f"number of blank pages of {extent}"
            worth = sum(self._values.get(page, 0.0) for page in pages)
            matched = [self._values.get(page, 0.0) for page in pages if self._uses[page] > 1]
            assert self._top(extent) == max(matched, default=0.0), f"the best of extent {extent}"
            assert abs(worth - self._worth[extent]) < 1e-6 * max(1.0, worth), "worth"
        present = [p for e in range(len(self._held)) if e not in absent for p in self._pages(e)]
        assert self._cache.num_absent == self._cache.num_pages - len(present), "absent pages"

    @property
    def mapped(self) -> list[int]:
        """Pages that have memory, those that are leaving too."""
        extents = (e for e in range(len(self._held)) if e not in self._absent)
        return [page for extent in extents for page in self._pages(extent)]

    def _pages(self, extent: int) -> range:
        return range(extent * self._size, (extent + 1) * self._size)

    def _value(self, page: int) -> float:
        """Return what a page's contents are worth by byte."""
        num_bytes = self._extent_pages * self._exchange.pool.page_bytes / self._size
        uses = min(self._uses[page], _MOST_USES) - 1 + self._chance
        seconds = self._exchange.compute_s(self._cache.page_size)
        return self._exchange.level + uses * seconds / num_bytes

    def _seconds(self, page: int) -> float:
        """Return what steps lose, as far as can be expected, when a cached page goes."""
        chance = 1.0 if self._uses[page] > 1 else self._chance
        return chance * self._exchange.compute_s(self._cache.page_size)

    def _note_gone(self, page: int, was_cached: bool) -> None:
        """Note that a page's contents go, if it was cached."""
        if was_cached and self._uses[page] == 1:
            self._chance -= _CHANCE_SHARE * self._chance

    def _stands(self, value: float, number: int, page: int) -> bool:
        """Return whether an entry of the order is that of a page that is cached now."""
        return self._numbers[page] == number and self._values.get(page) == value

    def _compact(self) -> None:
        """Take out of the order what is not cached any more, if that is most of it."""
        if len(self._order) > 2 * len(self._values) + len(self._uses):
            self._order = [one for one in self._order if self._stands(*one)]
            heapq.heapify(self._order)

    def _lose(self, page: int) -> float:
        """Forget a page's value, and return it; 0: it was not cached."""
        value = self._values.pop(page, 0.0)
        self._numbers[page] = 0
        extent = page // self._size
        self._worth[extent] -= value
        if value == self._tops[extent]:
            self._unsure.add(extent)  # pages of a prefix go one after the other
        return value

    def _top(self, extent: int) -> float:
        """Return the highest value of an extent's cached pages that were matched; 0: none."""
        if extent in self._unsure:
            pages = (page for page in self._pages(extent) if self._uses[page] > 1)
            values = (self._values[page] for page in pages if page in self._values)
            self._tops[extent] = max(values, default=0.0)
            self._unsure.discard(extent)
        return self._tops[extent]

    def _add(self) -> bool:
        """Give the lowest absent extent memory; False: there is none, or no room."""
        if not self._absent or self._exchange.available < self._extent_pages:
            return False
        extent = min(self._absent)
        if not self._memory.map_pages(self._pages(extent)):
            return False
        self._absent.discard(extent)
        self._idle.add(extent)
        self._worth[extent] = 0.0
        for page in self._pages(extent):
            self._note_blank(page, is_blank=True)
        self._cache.bring(self._pages(extent))
        return True

    def _give(self, extent: int) -> None:
        pages = self._pages(extent)
        self._cache.remove(pages)
        for page in pages:
            self._note_gone(page, page in self._values)
            self._lose(page)
            self._note_blank(page, is_blank=False)
        self._idle.discard(extent)
        self._leaving.add(extent)
        self._memory.leave_pages(pages, lambda: self._gone(extent))

    def _gone(self, extent: int) -> None:
        self._leaving.discard(extent)
        self._absent.add(extent)
