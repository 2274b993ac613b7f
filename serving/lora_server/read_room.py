"""Bytes of the adapters that a rank reads at the same time, which no other limit counts. No jax."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator

READ_BYTES = 4 << 30  # of the folders that are read side by side


class ReadRoom:
    """Bounds the bytes that threads read side by side; any thread may use it."""

    def __init__(self, most_bytes: int = READ_BYTES):
        """A folder of more than `most_bytes` is read too, alone."""
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._bytes = 0  # of those that are read
        self._waiting: list[int] = []  # numbers, in order of arrival
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Hold so many bytes, for which others have their turn first that came earlier."""
        with self._changed:
            number = next(self._numbers)
            self._waiting.append(number)
            try:
                self._changed.wait_for(lambda: self._waiting[0] == number and self._fits(num_bytes))
            finally:
                self._waiting.remove(number)
            self._bytes += num_bytes
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._bytes -= num_bytes
                self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        return not self._bytes or self._bytes + num_bytes <= self._most_bytes


def folder_bytes(folder: str) -> int:
    """Return the bytes of a folder's files; of what cannot be looked at, 0: the read says why."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except OSError:
        return 0
