"""Rate limits of one key: requests per second, tokens per minute."""

import contextlib
import dataclasses
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_SKEW_S = 5.0  # by which clocks of hosts may differ that share a budget


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
    engine's thread and the server's may call it. With a `file` the balance is that of all processes
    that name it; their clocks then agree within 5 s, as time.time does on several hosts. Of clocks
    that differ the foremost counts, so that none of them lets more through.
    """

    def __init__(
        self,
        per_minute: float,
        clock: Callable[[], float] = time.monotonic,
        file: Path | None = None,
    ):
        self.per_minute, self._clock, self._file = per_minute, clock, file
        self._own = _Balance(per_minute, clock())
        self._lock = threading.Lock()

    def wait_s(self) -> float:
        """Return 0 while something is left, else the seconds until then."""
        with self._balance() as balance:
            now, rate = self._clock(), self.per_minute / 60
            behind_s = balance.seen - now
            if behind_s > _SKEW_S:  # the other clock was wrong, or was set back
                behind_s, balance.seen = 0.0, now
            if behind_s <= 0:
                balance.left = min(self.per_minute, balance.left - behind_s * rate)
                balance.seen = now
            return 0.0 if balance.left >= 1.0 else (1.0 - balance.left) / rate + max(0.0, behind_s)

    def spend(self, tokens: int) -> None:
        """Charge tokens."""
        with self._balance() as balance:
            balance.left -= tokens

    @contextlib.contextmanager
    def _balance(self) -> Iterator["_Balance"]:
        """Yield the balance, to be changed; a file that cannot be had leaves this process's own.

        So does a new one that cannot be written, as on a full disk.
        """
        with self._lock, contextlib.ExitStack() as stack:
            try:
                file = None if self._file is None else stack.enter_context(_locked(self._file))
            except OSError:
                file = None
            if file is None:
                yield self._own
                return
            stored = os.pread(file, _FORMAT.size, 0)
            whole = len(stored) == _FORMAT.size
            balance = _Balance(*_FORMAT.unpack(stored)) if whole else self._own
            yield balance
            with contextlib.suppress(OSError):
                os.pwrite(file, _FORMAT.pack(balance.left, balance.seen), 0)


@dataclasses.dataclass
class _Balance:
    left: float  # tokens
    seen: float  # time of the last look


_FORMAT = struct.Struct("=dd")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield file
    finally:
        os.close(file)
