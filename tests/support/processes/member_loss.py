"""Loss of a member of an instance: the times in which it must be noticed and made good.

Both times are for a machine that does nothing else. A hung member is noticed by three heartbeats of
1 s that are missed, which threads without a core send and miss late: where other processes took
most of the cores during the wait, four times as long is allowed. A new start is compared with the
first start of the same test, and other processes may have come since: it may take twice as long,
and on a loaded machine four times that.
"""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

FOUND_S = 5.0
START_FOUND_S = 14.0  # while it starts: 10 s of silence, and looks at what computes
AGAIN_S = 2.0  # beside the start
_LOADED = 4.0  # times as long on a loaded machine
_ROOM = 2.0  # times the first start
_IDLE = 0.5  # of all cores' time: below, the machine is loaded


class MemberLoss:
    """One loss, which begins when this is made: these processes get this signal."""

    def __init__(self, pids: Iterable[int], number: signal.Signals):
        self._cores, self._began = _core_times(), time.monotonic()
        self.pids = list(pids)
        for pid in self.pids:
            os.kill(pid, number)

    def is_found(self, limit_s: float = FOUND_S) -> None:
        """Assert, when the first answer is 503, that it came soon enough."""
        seconds, idle = time.monotonic() - self._began, self._idle_share()
        print(f"found after {seconds:.2f} s, cores idle {idle:.2f}")
        assert seconds < (limit_s if idle >= _IDLE else _LOADED * limit_s)

    def is_over(self, start_s: float) -> None:
        """Assert, when an answer is 200 again, that it came soon enough after a start's seconds."""
        seconds, idle = time.monotonic() - self._began, self._idle_share()
        print(
            f"served again after {seconds:.2f} s, cores idle {idle:.2f}, the first start took "
            f"{start_s:.2f} s"
        )
        bar_s = _ROOM * start_s + AGAIN_S
        assert seconds < (bar_s if idle >= _IDLE else _LOADED * bar_s)

    def _idle_share(self) -> float:
        passed = [now - then for now, then in zip(_core_times(), self._cores, strict=True)]
        return (passed[3] + passed[4]) / max(1, sum(passed))  # idle, and waiting for a disk


def _core_times() -> list[int]:
    """Return all cores' time by use since boot: user, nice, system, idle, iowait, irq, ..."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return [int(field) for field in fields[1:9]]
