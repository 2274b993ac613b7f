"""Work that waits until no step in flight can read what it frees. No jax."""

import heapq
import itertools
import threading
from collections.abc import Callable


class Retirement:
    """Functions to call once a step has been read back; safe for threads.

    The device runs steps in order, so the results of step k on the host mean that k and all before
    it read nothing more. Unmapping is not ordered with a device's work: this is what orders it.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []  # a heap by step, then age
        self._ages = itertools.count()
        self._completed = -1

    @property
    def num_waiting(self) -> int:
        """Return how many functions have not been called yet."""
        with self._lock:
            return len(self._waiting)

    def defer(self, step: int, free: Callable[[], None]) -> bool:
        """Call `free` when `step`, the last that may read the memory, has completed.

        Where it has already, the call happens now, in this thread; returns whether it did.
        """
        with self._lock:
            late = step <= self._completed
            if not late:
                heapq.heappush(self._waiting, (step, next(self._ages), free))
        if late:
            free()
        return late

    def completed(self, step: int) -> int:
        """Call what waited for `step` or an earlier one, oldest first; return how many calls.

        A function that raises is not called again; those behind it wait for the next call.
        """
        calls = 0
        while True:
            with self._lock:
                self._completed = max(self._completed, step)
                if not self._waiting or self._waiting[0][0] > self._completed:
                    return calls
                free = heapq.heappop(self._waiting)[2]
            free()
            calls += 1
