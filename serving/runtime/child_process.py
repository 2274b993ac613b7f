"""Child process that ends with its parent's connection, and the base of its handles."""

import abc
import contextlib
import enum
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path


class Pulse(enum.Enum):
    """Answer of a process to a health check."""

    UP = "up"
    UNWELL = "unwell"  # it answers, and takes no requests
    SILENT = "silent"


class AbstractFarProcess(abc.ABC):
    """A process of another host, with the methods of BaseProcess that handles use."""

    pid: int | None = None  # of this host
    exitcode: int | None = None

    @property
    @abc.abstractmethod
    def sentinel(self) -> int:
        """A descriptor that becomes readable at its end. Raises ValueError for a closed handle."""

    @abc.abstractmethod
    def start(self) -> None:
        """Start it. Raises ConnectionError when the host is not there."""

    @abc.abstractmethod
    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""

    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Return whether it has not ended."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it at once. One whose host does not answer counts as ended soon after."""

    @abc.abstractmethod
    def is_at_work(self) -> bool:
        """Return whether a thread of it computes; False when the host does not answer."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give up what an ended process holds."""


class AbstractChild(abc.ABC):
    """The handle of a process that leaves by itself when its parent hangs up."""

    def __init__(self, process: BaseProcess | AbstractFarProcess, end_s: float):
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

    def end_by_signal(self, wait_s: float = 1.0) -> str:
        """Return " (SIGKILL)" or the like if a signal has ended the process, else "".

        The process may have a moment to end: its connection breaks earlier.
        """
        with contextlib.suppress(ValueError):  # closed meanwhile
            self._process.join(wait_s)
            status = self._process.exitcode
            if status is not None and status < 0:
                known = {int(number) for number in signal.Signals}
                return f" ({signal.Signals(-status).name if -status in known else -status})"
        return ""

    def kill(self) -> None:
        """End the process at once; `stop` must still be called."""
        self._process.kill()

    def is_at_work(self) -> bool:
        """Return whether a thread of the process computes: one that does may be silent."""
        process = self._process
        far = isinstance(process, AbstractFarProcess)
        return process.is_at_work() if far else is_at_work(self.pid)

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


def is_at_work(pid: int, looks: int = 5) -> bool:
    """Return whether a thread of the process runs, wants to run, or waits for a disk."""
    for _ in range(looks):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[0] in ("R", "D"):
                    return True
        time.sleep(0.05)
    return False
