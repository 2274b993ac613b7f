"""Turns of several benchmark processes, which all build their engines at once."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Wait until no other process has a turn of this file; None: there are no others."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
