"""Loads from the journal that ended the process: how often, so that one does not end it for ever.

A line is written before each load and one after it. A load that was begun and never finished has
ended its process, or was under way when somebody killed it. The file is not synced: it is about
processes that end, not about machines. No jax.
"""

import collections
import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

FILE = "adapters.attempts"

# One end may be somebody's kill -9 and two a bad day; a third start costs some seconds more.
MOST_ENDS = 3
_COMPACT_BYTES = 1 << 16
_BEGUN, _DONE = "+", "-"


class LoadAttempts:
    """The file in one folder; several processes may write. Names have no spaces."""

    def __init__(self, folder: Path):
        self._path = folder / FILE

    def is_quarantined(self, name: str, digest: str) -> bool:
        """Return whether loads of these files ended MOST_ENDS processes without a good one.

        A file that cannot be read keeps no adapter away.
        """
        with contextlib.suppress(OSError), self._locked() as file:
            return self._counts(file.read())[name, digest] >= MOST_ENDS
        return False

    @contextlib.contextmanager
    def attempt(self, name: str, digest: str) -> Iterator[None]:
        """Count what is done inside, unless it ends: also an error is an end.

        Where nothing can be written, as on a full disk, nothing is counted.
        """
        with contextlib.suppress(OSError):
            self._note(_BEGUN, name, digest)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._note(_DONE, name, digest)

    def forget(self, name: str, digest: str) -> None:
        """Begin anew: the files were loaded by request."""
        with self._locked() as file:
            known = self._counts(file.read())[name, digest]
        if known:
            self._note(_DONE, name, digest)

    def _note(self, sign: str, name: str, digest: str) -> None:
        with self._locked() as file:
            file.seek(0, 2)
            if file.tell() > _COMPACT_BYTES:
                self._compact(file)
            file.write(f"{sign} {name} {digest}\n")

    def _compact(self, file) -> None:
        file.seek(0)
        counts = self._counts(file.read())
        file.seek(0)
        file.truncate()
        for (name, digest), count in counts.items():
            file.write(f"{_BEGUN} {name} {digest}\n" * min(count, MOST_ENDS))

    def _counts(self, text: str) -> collections.Counter[tuple[str, str]]:
        """Return the loads that were begun since the last one that was finished."""
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        for line in text.splitlines():
            words = line.split(" ")
            if len(words) != 3:
                continue  # of a process that was killed while it wrote
            sign, name, digest = words
            if sign == _BEGUN:
                counts[name, digest] += 1
            else:
                counts.pop((name, digest), None)
        return counts

    @contextlib.contextmanager
    def _locked(self):
        with self._path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            file.seek(0)
            yield file
