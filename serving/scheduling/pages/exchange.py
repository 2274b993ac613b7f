"""One budget of pages for adapters and KV: the order in which pages are given up. No jax.

Both sides offer what nobody uses: idle adapters, and KV pages that are blank or only cached. The
offer that is worth least goes first, whichever side it is of. Its value is GDSF's: by byte and use,
the seconds to bring it back, on the level of what was given up last (adapters.use_ledger). What
goes is free a step or two later, when no step in flight reads it. Until then a claim is not met,
and nothing is held for it.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Protocol

from lora_jax.adapters.host_memory.use_ledger import UseLedger
from serving.scheduling.step_times import StepTimes

# Until they are measured.
LOAD_S_PER_BYTE = 1e-10
COMPUTE_S_PER_TOKEN = 1e-4
LEAST_LOAD_S_PER_BYTE = 2e-11  # the copy itself, of which an engine's thread may see nothing
_MEASURED_PAGES = 1  # loads are measured together until they are so many
_PROMPT_TOKENS = 64  # beside one of each row: a step of so many is mostly prompts
_LEAVING_PARTS = 8
# What leaves is free two steps later: after a claim that had to wait, a part of the pool is freed
# ahead of the next ones for some steps.
_AHEAD_PARTS, _AHEAD_STEPS = 32, 64
_FRESH_STEPS = 8  # an adapter that has come stays for so many without a use: one will take it
_SHARE = 0.1  # of a new measurement in the mean


@dataclasses.dataclass(frozen=True)
class Offer:
    """Pages that one side can spare; `give` begins to free them."""

    value: float
    num_pages: int
    give: Callable[[], None]
    seconds: float = 0.0  # that steps lose when it is brought back


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

    @property
    def num_pages(self) -> int:
        """Pages of the pool, used and free."""
        ...

    @property
    def num_available(self) -> int:
        """Pages that could be taken now."""
        ...


@dataclasses.dataclass(frozen=True)
class PoolShares:
    """Bytes of the pool by owner, and offers that were taken since the start."""

    total_bytes: int = 0
    kv_bytes: int = 0  # leaving pages included
    adapter_bytes: int = 0  # likewise
    given: int = 0


class PageExchange:
    """The order of value over all sides; the engine's thread uses it."""

    def __init__(self, pool: AnyPool, *, kept: int = 0):
        """`kept` pages never move, such as those of the base's experts."""
        self.pool, self._kept = pool, kept
        self._fresh: dict[str, int] = {}  # adapters that have come: the step, until their first use
        self._promises: list[Callable[[], int]] = []
        self._last_claim = -_AHEAD_STEPS - 1  # step of the last one that was not met
        self._ahead_but: Side | None = None  # whose own offers it would not have taken
        self.num_steps = 0  # that were planned since the start
        self.num_given = 0  # offers taken since the start
        self._asked = 0  # pages, by claims that were not met since `start_step`
        self._credit_s = 0.0  # of claims, see `start_step`
        self._is_idle = True  # nothing runs, comes or leaves
        self._is_starving = False  # the first claim of an adapter in this step is urgent
        self._coming: set[str] = set()  # adapters that have pages and are not there yet
        self._is_refused = False  # a claim of this step was worth too little, or there is nothing
        self._steps = StepTimes()  # of those that only decode
        self._load_s, self._compute_s = LOAD_S_PER_BYTE, COMPUTE_S_PER_TOKEN
        self._spent, self._loaded = 0.0, 0  # seconds and bytes since the last measurement
        self.uses = UseLedger(self.load_s)  # of adapters
        self._sides: list[Side] = []
        self._planned: collections.deque[float] = collections.deque()  # times, of steps in flight
        self._ended = 0.0  # of the last step

    @property
    def level(self) -> float:
        """The value of what was given up last."""
        return self.uses.level

    def shares(self, kv_pages: int) -> PoolShares:
        """Return the pool's bytes by owner; `kv_pages` of its pages are KV's."""
        pool, size = self.pool, self.pool.page_bytes
        total = pool.num_pages - self._kept
        used = pool.num_pages - pool.num_available - self._kept
        of_adapters = used - kv_pages
        return PoolShares(total * size, kv_pages * size, of_adapters * size, self.num_given)

    def join(self, side: Side, promised: Callable[[], int] | None = None) -> None:
        """Let a side's offers count from now on; `promised` pages it has yet to take."""
        self._sides.append(side)
        self._promises += [promised] if promised else []

    @property
    def available(self) -> int:
        """Pages that are free and promised to nobody."""
        return self.pool.num_available - sum(promised() for promised in self._promises)

    def claim(
        self,
        num_pages: int,
        claimant: Side,
        *,
        own: bool,
        below: float = math.inf,
        urgent: bool = False,
    ) -> bool:
        """Return whether so many pages are free; if not, have enough leave that is not in use.

        With `own` the claimant's offers count too, with `below` only those that are worth less. A
        claim that is not met is to be made again after the next step. Claims of one step add up,
        so that what waits for pages need not wait for one another; no more than a part of the pool
        leaves at a time, and no more than the wait was worth (`start_step`) unless it is urgent.
        """
        if self.would_meet(num_pages):
            return True
        self._asked += num_pages
        self._last_claim, self._ahead_but = self.num_steps, None if own else claimant
        given = self.num_given
        if own:
            urgent, self._is_starving = urgent or self._is_starving, False
        self._have_leave(self._asked, self._ahead_but, below, urgent=urgent or self._is_idle)
        self._is_idle &= self.num_given == given  # one claim is enough to go on
        return False

    def _have_leave(
        self, num_pages: int, but: Side | None, below: float, *, urgent: bool = False
    ) -> None:
        """Have offers leave until so many pages are free or on their way."""
        if self._is_refused and not urgent:
            return
        free, leaving = self.available, self.pages_leaving
        most = self.pool.num_pages // _LEAVING_PARTS
        self._is_refused |= leaving >= most
        while free + leaving < num_pages and leaving < most:
            offer = self.least(but)
            if offer is None or offer.value >= below:
                self._is_refused |= offer is None and but is None
                break
            if not urgent:
                if offer.seconds > self._credit_s:
                    self._is_refused = True
                    break
                self._credit_s -= offer.seconds
            leaving += offer.num_pages
            self.take(offer)

    def would_meet(self, num_pages: int) -> bool:
        """Return whether so many pages are free beside those that earlier claims wait for."""
        return self._asked + num_pages <= self.available

    @property
    def is_spent(self) -> bool:
        """True if no claim can be met in this step any more, nor have others leave."""
        refused = self._is_refused and not self._is_starving
        return refused and self._asked > self.available

    def start_step(
        self, num_running: int = 0, num_idle: int = 1, *, is_starving: bool = False
    ) -> None:
        """Begin to add up the claims of a step; while claims come, some pages are free ahead.

        `num_running` sequences run, and `num_idle` more could. While a claim is not met, running
        sequences pay alone for the part of a step that does not depend on its rows. These seconds
        are the claim's credit: evictions may cost others as much, in pages computed and adapters
        loaded again, so a wait costs at most twice what it had to. The credit lasts for some steps
        without a claim, such as those in which no row is free. With `is_starving`, a sequence has
        waited too long for its adapter, and the first claim of an adapter is urgent.
        """
        lost_s = num_idle * self._steps.fixed_s / num_running if self._asked and num_running else 0
        self._is_idle = not (num_running or self._coming or self.pages_leaving)
        self._is_starving = is_starving
        self._asked, self._is_refused = 0, False
        self.num_steps += 1
        self._credit_s = self._credit_s + lost_s if self.is_short else 0.0
        if self.is_short:
            self._have_leave(self.pool.num_pages // _AHEAD_PARTS, self._ahead_but, math.inf)

    @property
    def is_short(self) -> bool:
        """True if a claim was not met lately: free pages are then for those that are to come."""
        return self.num_steps - self._last_claim <= _AHEAD_STEPS

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

    def spent(self, seconds: float) -> None:
        """Note that the engine's thread was busy with loads for so long, which steps lose.

        What a load takes beside that does not count: it delays its own request alone, as other
        adapters' steps go on.
        """
        self._spent += seconds

    def comes(self, digest: str) -> None:
        """Note that an adapter has got pages and is loading."""
        self._coming.add(digest)

    def came(self, digest: str, num_bytes: int) -> None:
        """Note that an adapter is on the device."""
        self._coming.discard(digest)
        self._fresh[digest] = self.num_steps
        self._loaded += num_bytes
        if self._loaded >= _MEASURED_PAGES * self.pool.page_bytes:
            seconds = max(LEAST_LOAD_S_PER_BYTE, self._spent / self._loaded)
            self._load_s += _SHARE * (seconds - self._load_s)
            self._spent, self._loaded = 0.0, 0

    def left(self, digest: str) -> None:
        """Note that an adapter has left, or that its load was given up."""
        self._coming.discard(digest)

    def forget(self, digest: str) -> None:
        """Nobody asks for these weights any more."""
        self._coming.discard(digest)
        self._fresh.pop(digest, None)
        self.uses.forget(digest)

    def used(self, digest: str) -> None:
        """Count a use of an adapter."""
        self._fresh.pop(digest, None)
        self.uses.used(digest)

    def value(self, digest: str, num_bytes: int, *, is_needed: bool) -> float:
        """Return an adapter's worth by byte; a request that waits for it is a use to come."""
        value = self.uses.value(digest, num_bytes)
        if not is_needed:
            return value
        return max(value, self.level) + self.load_s(num_bytes) / max(num_bytes, 1)

    def old(self, digests: Iterable[str]) -> list[str]:
        """Return the adapters that did not come just now, for a request that is to find them."""
        first = self.num_steps - _FRESH_STEPS
        self._fresh = {digest: step for digest, step in self._fresh.items() if step > first}
        return [digest for digest in digests if digest not in self._fresh]

    def planned(self, now: float) -> None:
        """Note that a step goes to the device; steps end in this order."""
        self._planned.append(now)

    def completed(self, num_tokens: int, num_rows: int, now: float) -> None:
        """Note the end of the oldest step, of so many tokens of so many sequences.

        Steps with prompts tell the rate of prompts, those without what a row costs.
        """
        seconds = now - max(self._ended, self._planned.popleft())
        self._ended = now
        if num_tokens - num_rows >= _PROMPT_TOKENS:
            self._compute_s += _SHARE * (seconds / num_tokens - self._compute_s)
        if num_tokens == num_rows:
            self._steps.note(num_rows, seconds)
        else:
            self._steps.note_other(seconds)

    def load_s(self, num_bytes: int) -> float:
        """Return the seconds to bring so many bytes onto the device again."""
        return num_bytes * self._load_s

    def compute_s(self, num_tokens: int) -> float:
        """Return the seconds to compute the KV of so many tokens again."""
        return num_tokens * self._compute_s
