"""Lets parts of a run that are separate processes compile side by side and measure alone."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Quiet:
    """A lock file that processes share; without one nobody waits."""

    def __init__(self, file: Path | None):
        self._file = file

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process is within `alone` or `busy`."""
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
            fcntl.flock(file, how)
            yield
