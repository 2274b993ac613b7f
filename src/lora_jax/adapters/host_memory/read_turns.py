"""Turns of reads from the disk: each name once at a time, few at once, earliest deadline first.

No jax.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator


class ReadTurns:
    """Lets threads read side by side; any thread may call it."""

    def __init__(self, most: int = 4):
        """`most` bounds the reads at once, and so the bytes that no limit counts yet."""
        self._most = most
        self._changed = threading.Condition()
        self._reading: dict[str, int] = {}  # name -> thread
        self._waiting: dict[int, tuple[float, str]] = {}  # number of arrival -> deadline, name
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def turn(self, name: str, deadline: float = float("inf")) -> Iterator[None]:
        """Hold the name while its files are read; of those that wait the earliest deadline begins.

        A thread that holds a name may take it again.
        """
        if self._reading.get(name) == threading.get_ident():
            yield
            return
        with self._changed:
            number = next(self._numbers)
            self._waiting[number] = deadline, name
            try:
                self._changed.wait_for(lambda: self._next() == number)
            finally:
                del self._waiting[number]
            self._reading[name] = threading.get_ident()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                del self._reading[name]
                self._changed.notify_all()

    def _next(self) -> int | None:
        """Return the number of the thread that may begin now; None: all wait."""
        if len(self._reading) >= self._most:
            return None
        free = [(d, n) for n, (d, name) in self._waiting.items() if name not in self._reading]
        return min(free)[1] if free else None
