"""Seconds that a device takes for chosen programs, read without a wait of other threads."""

import time
from concurrent.futures import ThreadPoolExecutor

import jax


class DeviceStopwatch:
    """Seconds between results that a device gives one after the other; a thread waits for them."""

    def __init__(self):
        self.seconds, self.count = 0.0, 0
        self._waiting = ThreadPoolExecutor(1, "device stopwatch")  # its thread ends with this

    def add(self, before: jax.Array, after: jax.Array, count: int = 1) -> None:
        """Count the time from `before` to `after` when they are there; returns at once.

        It is the time of `count` runs. Neither array may be donated.
        """
        self._waiting.submit(self._wait_for, before, after, count)

    def settle(self) -> None:
        """Return when all that was added is counted."""
        self._waiting.submit(lambda: None).result()

    def _wait_for(self, before: jax.Array, after: jax.Array, count: int) -> None:
        before.block_until_ready()
        start = time.monotonic()
        after.block_until_ready()
        self.seconds += time.monotonic() - start
        self.count += count
