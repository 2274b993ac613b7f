"""Notices that a stream has been silent for long, with one timer for all its waits."""

import asyncio
from collections.abc import Callable


class Silence:
    """Calls `tell` once a wait between `begin` and `end` lasts `seconds`, until `close`.

    A wait costs two assignments; a timer for each wait would cost more than the rest of it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, tell: Callable[[], None]):
        self._loop, self._seconds, self._tell = loop, seconds, tell
        self._since_s: float | None = None
        self._timer = loop.call_later(seconds, self._look)

    def begin(self) -> None:
        """Note that a wait begins."""
        self._since_s = self._loop.time()

    def end(self) -> None:
        """Note that the wait has ended."""
        self._since_s = None

    def close(self) -> None:
        """Tell nothing any more."""
        self._timer.cancel()

    def _look(self) -> None:
        """Tell of a wait that is long, and look again when the next one may be."""
        now, left_s = self._loop.time(), self._seconds
        if self._since_s is not None:
            left_s += self._since_s - now
        if left_s <= 0:
            self._since_s, left_s = None, self._seconds
            self._tell()
        self._timer = self._loop.call_later(left_s, self._look)
