"""LoRA slots and rank rows whose memory comes from a pool of pages that KV shares. No jax.

See `allocator` for the life of an adapter. Memory is not written in the order of steps: what leaves
is free again only when `reclaim` says that no step can read it, as with experts (esft_allocator).
"""

import time
from collections.abc import Sequence
from typing import Protocol

from lora_jax.adapters.allocator import Placed, ResidencyStats
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.lora_allocator import LoraPlacement, Rows, SlotAllocator
from lora_jax.adapters.row_ranges import runs_of, take_all
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.rank_rows import rows_nbytes
from serving.scheduling.pages.exchange import Offer, PageExchange

_RESERVED_STEPS = 4  # a slot is kept for who asked so many steps ago at most
_MOST_PLACED = 2  # adapters for requests in one step: their maps keep the engine's thread busy


class RowMemory(Protocol):
    """Memory below rank rows, in pages of the pool."""

    def num_missing(self, rows: Rows) -> int:
        """Return how many pages `map_rows` would take."""
        ...

    def most_pages(self, rows: dict[int, int]) -> int:
        """Return the most pages that so many rows of each width take, wherever they lie."""
        ...

    def map_rows(self, rows: Rows) -> bool:
        """Give rows memory: all of them, or False and none."""
        ...

    def leave_rows(self, placed: Placed[Rows], *, mapped: bool) -> None:
        """Take an adapter's memory when no step in flight reads it; then `reclaim` follows."""
        ...


class PooledSlotAllocator(SlotAllocator):
    """Slots and rank rows, and the adapters' side of a page exchange; the engine's thread."""

    def __init__(
        self,
        catalogue: LoraCatalogue,
        num_slots: int,
        rows: dict[int, int],
        itemsize: int,
        memory: RowMemory,
        exchange: PageExchange,
        most_pages: int,
    ):
        """`rows` have addresses; `most_pages` of the pool may be adapters' at a time."""
        super().__init__(catalogue, num_slots, rows, itemsize)
        self._memory, self._exchange, self._most_pages = memory, exchange, most_pages
        self._leaving: list[Placed[Rows]] = []
        self._sizes: dict[Placed[Rows], int] = {}  # bytes of those that are placed
        self._reserved: dict[str, int] = {}  # adapters for whose sake slots leave: last step asked
        self._unmapped: set[str] = set()  # placed, but the system had no page for them
        self._last_placed = 0, 0  # step, and how many in it
        exchange.join(self)

    def check_fits(self, weights: AdapterWeights) -> None:
        super().check_fits(weights)
        need = self._memory.most_pages(weights.rows_by_width())
        if need > self._most_pages:
            raise ValueError(
                f"The adapter takes up to {need} pages of the pool; {self._most_pages} may be "
                "adapters', the rest is for the longest sequence (page_pool_bytes, max_model_len)."
            )

    def can_place(self, weights: AdapterWeights) -> bool:
        if weights.digest in self._placed or not self._has_slot(weights.digest):
            return False
        if not self._exchange.would_meet(self._least_pages(weights)):
            return False
        missing = self._missing(weights)
        return missing is not None and self._exchange.would_meet(missing)

    def has_room(self, weights: AdapterWeights) -> bool:
        return self.can_place(weights)  # `place` evicts none

    def make_room(self, weights: AdapterWeights) -> bool:
        """Return whether the adapter can be placed now; if not, have others leave for its sake."""
        if weights.digest in self._placed:
            return False
        if weights.digest in self._reserved:
            self._reserved[weights.digest] = self._exchange.num_steps
        if self._exchange.is_spent:  # dozens may ask in each step
            return False
        step, count = self._last_placed  # those that nobody waits for count too
        is_full = step == self._exchange.num_steps and count >= _MOST_PLACED
        if is_full and self.is_needed(weights.digest):  # the request asks again in the next step
            return False
        if self.can_place(weights):
            return True
        has_slot, missing = self._has_slot(weights.digest), None
        if has_slot:
            least = self._least_pages(weights)
            missing = self._missing(weights) if self._exchange.would_meet(least) else least
        if missing is not None:
            self._exchange.claim(missing, self, own=True)
        elif not self._leaving and (offer := self.offer()) is not None:
            self._exchange.take(offer)  # slots are short, or addresses of rows
            if not has_slot:
                self._reserved[weights.digest] = self._exchange.num_steps
        return False

    def try_place(self, weights: AdapterWeights, *, pinned: bool = False) -> LoraPlacement | None:
        return self.place(weights, pinned=pinned) if self.make_room(weights) else None

    def place(self, weights: AdapterWeights, *, pinned: bool = False) -> LoraPlacement:
        begun = time.perf_counter()
        placement = super().place(weights, pinned=pinned)
        self._reserved.pop(weights.digest, None)
        self._exchange.comes(weights.digest)
        step, count = self._last_placed
        now = self._exchange.num_steps
        self._last_placed = now, count + 1 if step == now else 1
        if not self._memory.map_rows(self._placed[weights.digest].room):
            self._unmapped.add(weights.digest)
        self.spent(time.perf_counter() - begun)
        return placement

    def spent(self, seconds: float) -> None:
        self._exchange.spent(seconds)

    def has_memory(self, digest: str) -> bool:
        """Return whether a placed adapter's rows may be written."""
        return digest not in self._unmapped

    def acquire(self, digest: str) -> int:
        slot = super().acquire(digest)
        self._exchange.used(digest)
        return slot

    def finish_loading(self, digest: str) -> int:
        self._exchange.came(digest, self._num_bytes(self._placed[digest]))
        return super().finish_loading(digest)

    def retire(self, digest: str) -> None:
        super().retire(digest)
        self._exchange.forget(digest)

    def reclaim(self, placed: Placed[Rows]) -> None:
        """Make slot and rows of an adapter that has left free: no step can read them."""
        self._leaving.remove(placed)
        self._sizes.pop(placed, None)
        super()._take_back(placed)

    @property
    def is_short(self) -> bool:
        """True if a claim of pages was not met since the last step was planned."""
        return self._exchange.is_short

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    @property
    def pages_leaving(self) -> int:
        """About how many pages of the pool are on their way to be free."""
        return sum(self._num_pages(placed) for placed in self._leaving)

    def offer(self) -> Offer | None:
        """Return the idle adapter that is worth least."""
        values = {digest: self._value(digest) for digest in self._exchange.old(super()._idle())}
        if not values:
            return None
        digest = min(values, key=lambda one: values[one])
        placed, value = self._placed[digest], values[digest]
        lost_s = self._exchange.load_s(self._num_bytes(placed))
        return Offer(value, self._num_pages(placed), lambda: self._free(digest), lost_s)

    def stats(self) -> ResidencyStats:
        stats = super().stats()
        used = sum(self._num_bytes(placed) for placed in self._held())
        return ResidencyStats(
            slots_used=len(self._placed) + len(self._leaving),
            slots_total=self.num_slots,
            bytes_used=used,
            bytes_total=self._most_pages * self._exchange.pool.page_bytes,
            rows_used=stats.rows_used,
            rows_total=stats.rows_total,
        )

    @property
    def mapped(self) -> list[tuple[int, int, int]]:
        """Rows that have memory, those of adapters that are leaving too."""
        resident = (p for digest, p in self._placed.items() if digest not in self._unmapped)
        return [row for placed in (*resident, *self._leaving) for row in placed.room]

    def _held(self) -> list[Placed[Rows]]:
        return [*self._placed.values(), *self._leaving]

    def _idle(self) -> list[str]:
        """Return the adapters that may be evicted, least valuable first, then oldest first."""
        return sorted(self._exchange.old(super()._idle()), key=self._value)

    def _value(self, digest: str) -> float:
        """Return what an adapter is worth by byte."""
        num_bytes = self._num_bytes(self._placed[digest])
        return self._exchange.value(digest, num_bytes, is_needed=self.is_needed(digest))

    def _victims(self, weights: AdapterWeights) -> tuple[str, ...] | None:
        """Nobody goes at once for another's sake: see `make_room`."""
        return () if self.can_place(weights) else None

    def _has_slot(self, digest: str) -> bool:
        """Return whether a slot is free that has not become so for another adapter's sake."""
        first = self._exchange.num_steps - _RESERVED_STEPS
        self._reserved = {one: last for one, last in self._reserved.items() if last >= first}
        others = len(self._reserved) - (digest in self._reserved)
        return len(self._free_slots) > (0 if digest in self._reserved else others)

    def _free(self, digest: str) -> None:
        placed = self._placed.pop(digest)
        self._exchange.left(digest)
        if placed.retired:
            self._exchange.forget(digest)
        mapped = digest not in self._unmapped
        self._unmapped.discard(digest)
        self._leaving.append(placed)
        self._memory.leave_rows(placed, mapped=mapped)

    def _least_pages(self, weights: AdapterWeights) -> int:
        """Return about the fewest pages that the adapter would take, without looking for rows.

        Its rows of a width mostly follow each other, and share a page at each end.
        """
        size = self._exchange.pool.page_bytes
        sizes = (
            rows_nbytes({width: count}, self._itemsize)
            for width, count in weights.rows_by_width().items()
        )
        return sum(max(0, -(-num_bytes // size) - 2) for num_bytes in sizes)

    def _missing(self, weights: AdapterWeights) -> int | None:
        """Return the pages that the adapter would take where it would lie; None: no rows."""
        need = weights.rows_by_width()
        if any(width not in self._pools for width in need):
            return None
        starts = take_all(self._pools, weights.demand, need)
        if starts is None:
            return None
        runs = runs_of(weights.demand, starts)
        missing = self._memory.num_missing(runs)
        for width, start, length in runs:
            self._pools[width].give(start, length)
        return missing

    def _num_bytes(self, placed: Placed[Rows]) -> int:
        if placed not in self._sizes:
            self._sizes[placed] = rows_nbytes(_by_width(placed.room), self._itemsize)
        return self._sizes[placed]

    def _num_pages(self, placed: Placed[Rows]) -> int:
        return max(1, self._num_bytes(placed) // self._exchange.pool.page_bytes)


def _by_width(rows: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for width, _, length in rows:
        counts[width] = counts.get(width, 0) + length
    return counts
