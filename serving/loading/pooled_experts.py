"""ESFT slots and expert indices whose memory comes from a pool of pages that KV shares. No jax."""

from typing import Protocol

from lora_jax.adapters.esft_allocator import ExpertAllocator, ExpertPlacement, ExpertSizes
from lora_jax.adapters.weights import PROJECTIONS, ExpertWeights
from serving.scheduling.pages.exchange import Offer, PageExchange


class AnyTensors(Protocol):
    """Expert tensors, as far as their memory counts here."""

    @property
    def expert_bytes(self) -> int: ...

    @property
    def matrix_bytes(self) -> int: ...

    @property
    def mapped(self) -> frozenset[tuple[int, int]]: ...


class PooledExpertAllocator(ExpertAllocator):
    """ExpertAllocator, and a side of a page exchange; the engine's thread uses it."""

    def __init__(self, num_slots: int, sizes: ExpertSizes, tensors: AnyTensors):
        """Nothing can be placed before `join`."""
        super().__init__(num_slots, sizes)
        self._tensors = tensors
        self._exchange: PageExchange | None = None
        self._most_pages = 0

    def join(self, exchange: PageExchange, most_pages: int) -> None:
        """Take part in an exchange, of whose pages so many may be adapters' at a time."""
        self._exchange, self._most_pages = exchange, most_pages
        exchange.join(self, promised=lambda: self._promised)

    def check_fits(self, weights: ExpertWeights) -> None:
        super().check_fits(weights)
        need = self._need(weights)
        if need > self._most_pages:
            raise ValueError(
                f"The adapter takes up to {need} pages of the pool; {self._most_pages} may be "
                "adapters', the rest is for the longest sequence (page_pool_bytes, max_model_len)."
            )

    def can_place(self, weights: ExpertWeights) -> bool:
        return super().can_place(weights) and self._pool.would_meet(self._need(weights))

    def make_room(self, weights: ExpertWeights) -> bool:
        """Return whether the adapter can be placed now; if not, have others leave for its sake."""
        if weights.digest in self._placed:
            return False
        if self.can_place(weights):
            return True
        if super().can_place(weights):
            self._pool.claim(self._need(weights), self, own=True)
        elif not self._leaving and (offer := self.offer()) is not None:
            self._pool.take(offer)
        return False

    def place(self, weights: ExpertWeights, *, pinned: bool = False) -> ExpertPlacement:
        placement = super().place(weights, pinned=pinned)
        self._pool.comes(weights.digest)
        return placement

    def spent(self, seconds: float) -> None:
        self._pool.spent(seconds)

    def acquire(self, digest: str) -> int:
        slot = super().acquire(digest)
        self._pool.used(digest)
        return slot

    def finish_loading(self, digest: str) -> int:
        self._pool.came(digest, self._num_bytes(self._placed[digest].room))
        return super().finish_loading(digest)

    def retire(self, digest: str) -> None:
        super().retire(digest)
        self._pool.forget(digest)

    @property
    def pages_leaving(self) -> int:
        """About how many pages of the pool are on their way to be free."""
        return sum(self._frees(placement) for placement in self._leaving)

    def offer(self) -> Offer | None:
        """Return the idle adapter that is worth least."""
        digest = next(iter(self._idle()), None)
        if digest is None:
            return None
        placement = self._placed[digest].room
        value = self._value(digest)
        lost_s = self._pool.load_s(self._num_bytes(placement))
        return Offer(value, self._frees(placement), lambda: self._free(digest), lost_s)

    @property
    def _pool(self) -> PageExchange:
        assert self._exchange is not None, "the allocator takes part in no exchange"
        return self._exchange

    @property
    def _promised(self) -> int:
        """Pages of adapters that are loading and have yet to be mapped."""
        mapped, pages = self._tensors.mapped, 0
        for placed in self._placed.values():
            if placed.loading:
                count = sum(place not in mapped for place in placed.room.places)
                pages += self._need(placed.room.weights) * count // len(placed.room.places)
        return pages

    def _idle(self) -> list[str]:
        """Return the adapters that may be evicted, least valuable first, then oldest first."""
        return sorted(self._pool.old(super()._idle()), key=self._value)

    def _value(self, digest: str) -> float:
        """Return what an adapter is worth by byte, as `pooled_allocator` counts it."""
        num_bytes = self._num_bytes(self._placed[digest].room)
        return self._pool.value(digest, num_bytes, is_needed=self.is_needed(digest))

    def _free(self, digest: str) -> None:
        is_retired = self._placed[digest].retired
        super()._free(digest)
        self._pool.left(digest)
        if is_retired:
            self._pool.forget(digest)

    def _need(self, weights: ExpertWeights) -> int:
        """Return the most pages that an adapter takes, wherever its experts lie in a row."""
        page, matrix = self._pool.pool.page_bytes, self._tensors.matrix_bytes
        counts = (len(experts) for experts in weights.experts.values() if experts)
        return sum(len(PROJECTIONS) * (-(-count * matrix // page) + 1) for count in counts)

    def _frees(self, placement: ExpertPlacement) -> int:
        return max(1, self._num_bytes(placement) // self._pool.pool.page_bytes)

    def _num_bytes(self, placement: ExpertPlacement) -> int:
        return placement.weights.num_experts * self._tensors.expert_bytes
