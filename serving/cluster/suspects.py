"""Requests during which an instance ended: each is tried once more, then refused. No jax.

Whether a request is the cause is not known: others were under way beside it. So one death is
forgiven, and a refusal ends by itself, later after each further death. A process that ends with
several equal requests has died once.
"""

import collections
import hashlib
import time
from collections.abc import Callable, Hashable

from serving.http.errors import ApiError

_MOST = 1024  # requests that are remembered
_FIRST_S = 60.0  # a request is refused for so long after its second death
_LONGEST_S = 3600.0
_NONE: frozenset[Hashable] = frozenset()


class Suspects:
    """Counts deaths by the request's digest; for one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        # Processes that have died with a request, and when it is refused no more.
        self._deaths: collections.OrderedDict[bytes, tuple[frozenset[Hashable], float]]
        self._deaths = collections.OrderedDict()

    def check(self, path: str, body: bytes) -> None:
        """Raise ApiError 503 for a request that is refused now."""
        if not self._deaths:
            return
        _, until = self._deaths.get(_digest(path, body), (_NONE, 0.0))
        left = until - self._clock()
        if left > 0:
            raise _refusal(left)

    def died(self, path: str, body: bytes, process: Hashable) -> None:
        """A process has ended with this request. Raises ApiError 503 unless it may be retried.

        `process` tells its deaths from those of others, and of the process in its place.
        """
        key = _digest(path, body)
        dead = self._deaths.pop(key, (_NONE, 0.0))[0] | {process}
        wait_s = 0.0 if len(dead) < 2 else min(_LONGEST_S, _FIRST_S * 2 ** (len(dead) - 2))
        self._deaths[key] = dead, self._clock() + wait_s
        if len(self._deaths) > _MOST:
            self._deaths.popitem(last=False)
        if wait_s:
            raise _refusal(wait_s)

    def answered(self, path: str, body: bytes) -> None:
        """An instance has answered this request, which therefore is not the cause."""
        if self._deaths:
            self._deaths.pop(_digest(path, body), None)


def _refusal(wait_s: float) -> ApiError:
    return ApiError(
        503,
        "Two instances ended while they worked on this request; it is refused for some time.",
        headers={"Retry-After": str(max(1, round(wait_s)))},
    )


def _digest(path: str, body: bytes) -> bytes:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape") + b"\0" + body).digest()
