"""Slows down the answers to wrong keys while many come. No state per caller."""

import time
from collections.abc import Callable

FREE = 10.0  # wrong keys that are answered at once
STEP_S = 0.05  # more for each further one
MOST_S = 2.0
_HALF_LIFE_S = 10.0


class FailedKeys:
    """One number for all callers: how many wrong keys came lately. Right keys never wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._recent, self._seen = 0.0, clock()

    def delay_s(self) -> float:
        """Count one wrong key and return how long its answer is to be held back."""
        now = self._clock()
        self._recent *= 0.5 ** ((now - self._seen) / _HALF_LIFE_S)
        self._recent, self._seen = self._recent + 1, now
        return min(MOST_S, STEP_S * max(0.0, self._recent - FREE))
