"""Loads from the journal that ended the process: how often, so that one does not end it for ever.

A line is written before each load and one after it. A load that was begun and never finished has
ended its process, or was under way when somebody killed it. A line names its process, since the
instances of one server load the same adapters at the same time. The file is not synced: it is about
processes that end, not about machines. No jax.
"""

import collections
import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

FILE = "adapters.attempts"

# One end may be somebody's kill -9 and two a bad day; a third start costs some seconds more.
MOST_ENDS = 3
_COMPACT_BYTES = 1 << 16
_BEGUN, _DONE = "+", "-"
_NOBODY = "0.0"  # the process of a line where that does not matter


class LoadAttempts:
    """The file in one folder; several processes may write. Names have no spaces."""

    def __init__(self, folder: Path):
        self._path = folder / FILE

    def is_quarantined(self, name: str, digest: str) -> bool:
        """Return whether loads of these files ended MOST_ENDS processes without a good one.

        A file that cannot be read keeps no adapter away.
        """
        with contextlib.suppress(OSError), self._locked() as file:
            begun = self._begun(file.read()).get((name, digest), ())
            return sum(not _is_alive(process) for process in begun) >= MOST_ENDS
        return False

    @contextlib.contextmanager
    def attempt(self, name: str, digest: str) -> Iterator[None]:
        """Count what is done inside, unless it ends: also an error is an end.

        Where nothing can be written, as on a full disk, nothing is counted.
        """
        with contextlib.suppress(OSError):
            self._note(_BEGUN, name, digest, _process(os.getpid()))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._note(_DONE, name, digest)

    def forget(self, name: str, digest: str) -> None:
        """Begin anew: the files were loaded by request."""
        with self._locked() as file:
            is_known = (name, digest) in self._begun(file.read())
        if is_known:
            self._note(_DONE, name, digest)

    def _note(self, sign: str, name: str, digest: str, process: str = _NOBODY) -> None:
        with self._locked() as file:
            file.seek(0, 2)
            if file.tell() > _COMPACT_BYTES:
                self._compact(file)
            file.write(f"{sign} {name} {digest} {process}\n")

    def _compact(self, file) -> None:
        file.seek(0)
        begun = self._begun(file.read())
        file.seek(0)
        file.truncate()
        for (name, digest), processes in begun.items():
            ended = [process for process in processes if not _is_alive(process)]
            alive = [process for process in processes if process not in ended]
            for process in ended[:MOST_ENDS] + alive:
                file.write(f"{_BEGUN} {name} {digest} {process}\n")

    def _begun(self, text: str) -> dict[tuple[str, str], list[str]]:
        """Return the processes of loads that were begun since the last one that was finished."""
        begun: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for line in text.splitlines():
            words = line.split(" ")
            if len(words) != 4:
                continue  # of a process that was killed while it wrote
            sign, name, digest, process = words
            if sign == _BEGUN:
                begun[name, digest].append(process)
            else:
                begun.pop((name, digest), None)
        return begun

    @contextlib.contextmanager
    def _locked(self):
        with self._path.open("a+", encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            file.seek(0)
            yield file


def _process(pid: int | str) -> str:
    """Return a process's number and when it began, _NOBODY for one that has ended.

    The number alone would name another process after a container's restart.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _NOBODY
    return _NOBODY if state in "ZX" else f"{pid}.{rest[18]}"


def _is_alive(process: str) -> bool:
    return process != _NOBODY and _process(process.partition(".")[0]) == process
