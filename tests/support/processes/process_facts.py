"""Facts of processes by /proc: whether one has ended, and what this one holds."""

import contextlib
import os
import time


def ended(pid: int) -> bool:
    """Return whether a process has ended, within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def open_files() -> frozenset[tuple[str, str]]:
    """Return this process's descriptors, each with what it is open for.

    A test that leaves none behind has no more of them afterwards. Their number is no fact of the
    test's own: threads and the collector close what earlier tests have left.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since, as that of the listing
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(found)


def held() -> tuple[int, int]:
    """Return how many descriptors and processes this process has."""
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return len(os.listdir("/proc/self/fd")), len(children.read().split())
