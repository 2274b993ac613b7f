"""Mailbox from the engine's thread to the event loop, with few wake-ups for many deltas."""

import asyncio
import collections
import contextlib
from typing import Any

GAP_S = 0.002  # under load the loop is woken this seldom; each wake-up costs both threads time


class Mailbox:
    """Carries items to queues of one event loop; the first of a burst arrives at once."""

    def __init__(self) -> None:
        self._items: collections.deque[tuple[asyncio.Queue[Any], Any]] = collections.deque()
        self._woken = False
        self._last_s = 0.0

    def put(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any], item: Any) -> None:
        """Put an item into the queue soon; any thread may call. A closed loop drops it."""
        self._items.append((queue, item))
        if self._woken:
            return
        self._woken = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        wait_s = self._last_s + GAP_S - loop.time()
        if wait_s > 0:
            loop.call_later(wait_s, self._deliver, loop)
        else:
            self._deliver(loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        self._last_s = loop.time()
        self._woken = False  # before looking: what comes after the last look wakes again
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)
