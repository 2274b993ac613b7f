"""Bytes of functions' processes as their agent sees them, which bound what they say. No jax."""

from typing import Any

from serving.functions.handle import Function
from serving.functions.process_memory import bounded_private_bytes
from serving.functions.processes import Zygote


class SeenMemory:
    """The view of one agent; any thread may call."""

    def __init__(self, zygote: Zygote):
        """`zygote` is the parent of all processes."""
        self._zygote = zygote
        self.shared_bytes = 0  # of the backbone, which processes map and do not hold

    def bytes_of(self, pid: int | None, said: Any) -> int:
        """Return the bytes that a process holds: those that it says, within what can be seen.

        None is a process of several functions, whose share is what is said. Raises ValueError and
        TypeError where that is no number.
        """
        if pid is None:
            return int(said)
        return bounded_private_bytes(float(said), pid, self._zygote.pid, self.shared_bytes)

    def least_of(self, function: Function) -> int:
        """Return the least that the function's own process can hold now; 0 without one."""
        running = function.running
        pid = None if running is None else running.own_pid
        return self.bytes_of(pid, 0)
