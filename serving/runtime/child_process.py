"""A process that lives as long as a connection of its parent's: what every handle of one can do."""

import abc
import enum
from multiprocessing.process import BaseProcess


class Pulse(enum.Enum):
    """Answer of a process to a health check."""

    UP = "up"
    UNWELL = "unwell"  # it answers, and takes no requests
    SILENT = "silent"


class AbstractChild(abc.ABC):
    """The handle of a process that leaves by itself when its parent hangs up."""

    def __init__(self, process: BaseProcess, end_s: float):
        """Start the process; `end_s` is how long it may take to leave."""
        self._process, self._end_s, self._stopped = process, end_s, False
        self.is_ready = False
        process.start()
        self.pid: int = process.pid or 0

    @abc.abstractmethod
    def hang_up(self) -> None:
        """Close the connection that keeps the process."""

    @abc.abstractmethod
    def pulse(self, limit_s: float) -> Pulse:
        """Ask the process whether it is well, waiting so long for the answer."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process ends, to wait for."""
        return self._process.sentinel

    @property
    def exit_status(self) -> int | None:
        """The exit status of a process whose sentinel said that it ends, negative for a signal."""
        self._process.join(self._end_s)  # the sentinel is a little early
        return self._process.exitcode

    def kill(self) -> None:
        """End the process at once; `stop` must still be called."""
        self._process.kill()

    def stop(self, end_s: float | None = None) -> None:
        """End the process: it leaves by itself, or is killed. A second call does nothing.

        `end_s` is how long it may take now, by default what was said when it was started.
        """
        if self._stopped:
            return
        self._stopped = True
        self.hang_up()
        self._process.join(self._end_s if end_s is None else end_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
