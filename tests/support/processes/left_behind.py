"""Ends what tests have started once their pytest process has gone, whatever ended that.

A signal to pytest ends it, or a worker of it, before fixtures can end their servers. So a watcher
that is no child of pytest waits for its end, and then ends all processes that have its mark in
their environment.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

MARK = "LORA_JAX_TESTS"  # of the environment: the pytest process that has started a process
_LEAVE_S = 20.0  # for a server to end by itself


def watch() -> None:
    """Have what this process starts from now on end after it, and what that starts."""
    mark = _mark(os.getpid())
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, start_new_session=True)
    os.environ[MARK] = mark


def _mark(process: int) -> str:
    """Return a process's number and when it began: its number is given again.

    Raises OSError for one that has ended, also where nobody has asked how.
    """
    with open(f"/proc/{process}/stat") as file:
        state, *rest = file.read().rpartition(")")[2].split()
    if state in "ZX":
        raise ProcessLookupError(f"process {process} has ended")
    return f"{process}-{rest[18]}"


def _wait_ended(process: int, mark: str) -> None:
    with contextlib.suppress(OSError):  # there are kernels without these descriptors
        select.select([os.pidfd_open(process)], [], [])
    with contextlib.suppress(OSError):
        while _mark(process) == mark:
            time.sleep(0.2)


def marked(mark: str) -> Iterator[int]:
    """Return the processes that have the mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for number in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{number}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                yield int(number)


def end(mark: str, leave_s: float = _LEAVE_S) -> None:
    """End the processes of a mark; those that have not left in time are killed."""
    told: set[int] = set()
    until = time.monotonic() + leave_s
    while left := set(marked(mark)):
        sign = signal.SIGTERM if time.monotonic() < until else signal.SIGKILL
        for process in left if sign == signal.SIGKILL else left - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, sign)
        told |= left
        time.sleep(0.1)


def _main(process: int, mark: str) -> None:
    if os.fork():
        return  # a child would be counted by tests that look for theirs
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)  # whoever reads pytest's output waits for nothing else
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent_to_all, signal.SIG_IGN)
    _wait_ended(process, mark)
    end(mark)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
