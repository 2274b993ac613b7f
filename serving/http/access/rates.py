"""Rate limits of one key: requests per second, tokens per minute."""

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Lets `rate` requests per second through, and as many as one second's worth at once."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self._clock = rate, clock
        self._burst = max(1.0, rate)
        self._tokens, self._seen = self._burst, clock()

    def wait_s(self) -> float:
        """Take one token and return 0, or return the seconds until there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._seen) * self.rate)
        self._seen = now
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / self.rate
        self._tokens -= 1.0
        return 0.0


class TokenBudget:
    """Counts prompt and generated tokens against `per_minute` of them.

    A request begins while something is left and is charged for what it really takes, so the
    balance may go below zero; nothing begins until it is above. Over time the rate is exact. The
    engine's thread and the server's may call it.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic):
        self.per_minute, self._clock = per_minute, clock
        self._left, self._seen = per_minute, clock()
        self._lock = threading.Lock()

    def wait_s(self) -> float:
        """Return 0 while something is left, else the seconds until then."""
        with self._lock:
            now, rate = self._clock(), self.per_minute / 60
            self._left = min(self.per_minute, self._left + (now - self._seen) * rate)
            self._seen = now
            return 0.0 if self._left >= 1.0 else (1.0 - self._left) / rate

    def spend(self, tokens: int) -> None:
        """Charge tokens."""
        with self._lock:
            self._left -= tokens
