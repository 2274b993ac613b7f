"""Short turns at the interpreter's lock while a thread must not wait for it. No jax."""

import contextlib
import sys
import threading
from collections.abc import Iterator

from serving.engine.loop.pacing import SWITCH_S


class ShortSwitches:
    """A context of any number of threads in which the lock changes hands after SWITCH_S seconds.

    With Python's interval a thread keeps the lock for up to 5 ms from one that waits for it.
    """

    def __init__(self):
        self._lock, self._inside, self._before = threading.Lock(), 0, 0.0

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Shorten the interpreter's switch interval; the last thread to leave restores it."""
        with self._lock:
            if not self._inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_S))
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    sys.setswitchinterval(self._before)


short_switches = ShortSwitches()  # of the process, as what it changes is
