"""Descriptors as a process with many connections has them: select takes none from 1024 on."""

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterator

_NUMBER = 1200


@contextlib.contextmanager
def high_descriptor(descriptor: int) -> Iterator[int]:
    """Yield a copy with a high number, which the test may close, in place of the descriptor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] <= _NUMBER:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * _NUMBER, limits[1]), limits[1]))
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _NUMBER)
    os.close(descriptor)
    try:
        yield high
    finally:
        with contextlib.suppress(OSError):
            os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
