"""One budget of pages for adapters and KV: who gives pages up when they are short. No jax.

Both sides offer what nobody uses: idle adapters, and KV pages that are blank or only cached. The
offer that is worth least goes first, whichever side it is of. Its value is GDSF's: by byte and use,
the seconds to bring it back, on the level of what was given up last (adapters.use_ledger). What
goes is free a step or two later, when no step in flight reads it. Until then a claim is not met,
and nothing is held for it.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Protocol

from lora_jax.adapters.use_ledger import UseLedger

# Until they are measured.
LOAD_BYTES_PER_S = 5e9
COMPUTE_TOKENS_PER_S = 1e4
_PROMPT_TOKENS = 64  # a step of so many is mostly prompts
_SHARE = 0.1  # of a new measurement in the mean


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one side can do without: pages that `give` sends on their way to be free."""

    value: float
    num_pages: int
    give: Callable[[], None]


class Side(Protocol):
    """Adapters of a kind, or the KV cache."""

    @property
    def pages_leaving(self) -> int:
        """Pages that were given up and are not free yet."""
        ...

    def offer(self) -> Offer | None:
        """Return what is worth least of all that nobody uses; None: nothing."""
        ...


class AnyPool(Protocol):
    """Pages of memory, as far as they are counted here."""

    page_bytes: int
    num_pages: int

    @property
    def num_available(self) -> int:
        """Pages that could be taken now."""
        ...


@dataclasses.dataclass(frozen=True)
class PoolShares:
    """Bytes of the pool by who has them now, and offers that were taken since the start."""

    total_bytes: int = 0
    kv_bytes: int = 0  # leaving pages included
    adapter_bytes: int = 0  # likewise
    given: int = 0


class PageExchange:
    """The order of value over all sides; the engine's thread uses it."""

    def __init__(self, pool: AnyPool):
        self.pool = pool
        self.num_given = 0  # offers taken since the start
        self.is_short = False  # a claim was not met since the last step was planned
        self._load_rate, self._compute_rate = LOAD_BYTES_PER_S, COMPUTE_TOKENS_PER_S
        self.uses = UseLedger(self.load_s)  # of adapters
        self._sides: list[Side] = []
        self._planned: collections.deque[float] = collections.deque()  # times, of steps in flight
        self._ended = 0.0  # of the last step

    @property
    def level(self) -> float:
        """The value of what was given up last."""
        return self.uses.level

    def shares(self, kv_pages: int) -> PoolShares:
        """Return who has the pool, of which so many pages are KV's."""
        pool, size = self.pool, self.pool.page_bytes
        used = pool.num_pages - pool.num_available
        sizes = (pages * size for pages in (pool.num_pages, kv_pages, used - kv_pages))
        return PoolShares(*sizes, self.num_given)

    def join(self, side: Side) -> None:
        """Let a side's offers count from now on."""
        self._sides.append(side)

    def claim(self, num_pages: int, claimant: Side, *, own: bool) -> bool:
        """Return whether so many pages are free; if not, have enough leave that is not in use.

        With `own` the claimant's offers count too. A claim that is not met is to be made again
        after the next step.
        """
        free = self.pool.num_available
        missing = num_pages - free - self.pages_leaving
        others = None if own else claimant
        while missing > 0 and (offer := self.least(others)) is not None:
            missing -= offer.num_pages
            self.take(offer)
        self.is_short = self.is_short or num_pages > free
        return num_pages <= free

    @property
    def pages_leaving(self) -> int:
        """Pages that were given up and are not free yet."""
        return sum(side.pages_leaving for side in self._sides)

    def least(self, but: Side | None = None) -> Offer | None:
        """Return the offer that is worth least, of all sides but one."""
        sides = (side for side in self._sides if side is not but)
        offers = [offer for side in sides if (offer := side.offer()) is not None]
        return min(offers, key=lambda offer: offer.value, default=None)

    def take(self, offer: Offer) -> None:
        """Have what was offered leave; what stays is then worth more than what has gone."""
        self.raise_level(offer.value)
        self.num_given += 1
        offer.give()

    def raise_level(self, value: float) -> None:
        """Note that something of this value has gone."""
        self.uses.level = max(self.uses.level, value)

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """Note how long it took to bring an adapter onto the device."""
        if seconds > 0:
            self._load_rate += _SHARE * (num_bytes / seconds - self._load_rate)

    def planned(self, now: float) -> None:
        """Note that a step goes to the device; steps end in this order."""
        self._planned.append(now)

    def completed(self, num_tokens: int, now: float) -> None:
        """Note the end of the oldest step, of so many tokens; those with prompts tell the rate."""
        seconds = now - max(self._ended, self._planned.popleft())
        self._ended = now
        if seconds > 0 and num_tokens >= _PROMPT_TOKENS:
            self._compute_rate += _SHARE * (num_tokens / seconds - self._compute_rate)

    def load_s(self, num_bytes: int) -> float:
        """Return the seconds to bring so many bytes onto the device again."""
        return num_bytes / self._load_rate

    def compute_s(self, num_tokens: int) -> float:
        """Return the seconds to compute the KV of so many tokens again."""
        return num_tokens / self._compute_rate
