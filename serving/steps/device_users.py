"""Users of a process's devices, and steps that wait on a device for the host.

A step that waits keeps its device busy. Some calls of a driver return only when the device is idle:
those that make a CUDA graph, load a kernel or attach a profiler. Meanwhile they keep locks, which
the thread that makes the values needs to read the step before. The two would wait for each other
until the step gives up. So steps wait only while the process has one user of its devices.

A CPU has no such calls, but a step that waits keeps threads of the pool that computes all programs.
There some steps may wait beside other users too, as many as leave threads for these.
"""

import contextlib
import threading
from collections.abc import Iterator

_PATIENCE_S = 25.0  # a step that waits has given up by then


class DeviceUsers:
    """Counts users and steps that wait; any thread may call it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_users = self._num_waits = self._most = 0

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Be a user inside: an engine, or a call that may wait for an idle device.

        Where it is not the only one it begins when no more steps wait than may beside others.
        """
        with self._changed:
            self._num_users += 1
        try:
            with self._changed:  # an interrupt may end the wait
                if self._num_users > 1:
                    self._changed.wait_for(lambda: self._num_waits <= self._most, _PATIENCE_S)
            yield
        finally:
            with self._changed:
                self._num_users -= 1

    def begin_wait(self, most: int = 0) -> bool:
        """Return whether a step may go out now that will wait for the host; then it counts.

        `most` steps may wait beside other users; it is the same in each call of a process.
        """
        with self._changed:
            self._most = most
            may = self._num_users <= 1 or self._num_waits < most
            self._num_waits += may
        return may

    def end_wait(self) -> None:
        """Count a step out whose values the host has written."""
        with self._changed:
            self._num_waits -= 1
            self._changed.notify_all()


# Of the process: its engines know nothing of each other.
USERS = DeviceUsers()
