"""Mailbox from the engine's thread to the event loop, with few wake-ups for many deltas."""

import asyncio
import collections
import contextlib
from typing import Any

GAP_S = 0.002  # under load the loop is woken this seldom; each wake-up costs both threads time
# What the loop does with a burst holds up the engine's thread, which shares Python's lock. So it
# has a third of the time, unless bursts take long: a pause follows, so many times as long as the
# burst took, and the next one has more tokens of each answer.
PAUSE, LONGEST_PAUSE_S = 2.0, 0.025
MOST_KEPT = 256  # items that wake nobody; more at once would hold up the loop


class Inbox[T](asyncio.Queue[T]):
    """A queue that a mailbox fills."""

    def take(self, items: list[T]) -> None:
        """Put what a burst has for this queue, in order; called by the event loop."""
        for item in items:
            self.put_nowait(item)


class Mailbox:
    """Carries items to inboxes of one event loop; the first of a burst arrives at once.

    The loop is to have a mailbox of its own.
    """

    def __init__(self) -> None:
        self._items: collections.deque[tuple[Inbox[Any], Any]] = collections.deque()
        self._woken = False
        self._last_s, self._gap_s = 0.0, GAP_S

    def put(
        self,
        loop: asyncio.AbstractEventLoop,
        inbox: Inbox[Any],
        item: Any,
        *,
        wakes: bool = True,
    ) -> None:
        """Put an item into the inbox soon; any thread may call. A closed loop drops it.

        Unless it `wakes` the loop, the item arrives with the next one that does, or with many.
        """
        self._items.append((inbox, item))
        if self._woken or not (wakes or len(self._items) >= MOST_KEPT):
            return
        self._woken = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        wait_s = self._last_s + self._gap_s - loop.time()
        if wait_s > 0:
            loop.call_later(wait_s, self._deliver, loop)
        else:
            self._deliver(loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        self._last_s = loop.time()
        self._woken = False  # before looking: what comes after the last look wakes again
        items, taken = self._items, {}
        while items:
            inbox, item = items.popleft()
            taken.setdefault(inbox, []).append(item)
        for inbox, own in taken.items():
            inbox.take(own)
        loop.call_soon(self._took, loop, self._last_s)  # behind the tasks that got something

    def _took(self, loop: asyncio.AbstractEventLoop, begun_s: float) -> None:
        took_s = loop.time() - begun_s
        self._gap_s = max(GAP_S, took_s + min(LONGEST_PAUSE_S, PAUSE * took_s))
