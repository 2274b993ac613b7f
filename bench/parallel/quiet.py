"""Lets parts of a run that are separate processes compile side by side and measure alone."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PATIENCE_S, LOOK_S = 45.0, 0.05


class Quiet:
    """A lock file that processes share; without one nobody waits.

    `was_alone` is False once a measurement has begun beside others: they took too long.
    """

    def __init__(self, file: Path | None, patience_s: float = PATIENCE_S):
        self._file, self._patience_s = file, patience_s
        self.was_alone = True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process is within `alone` or `busy`, or for `patience_s`."""
        with self._held(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Use the devices, beside others that do not measure."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def _held(self, how: int) -> Iterator[None]:
        if self._file is None:
            yield
            return
        with self._file.open("a") as file:
            if not self._take(file, how) and how == fcntl.LOCK_EX:
                self.was_alone = False
            yield

    def _take(self, file: IO[str], how: int) -> bool:
        end = time.monotonic() + self._patience_s
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, how | fcntl.LOCK_NB)
                return True
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_S)
