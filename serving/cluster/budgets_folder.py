"""A folder below --state-dir where instances of several hosts share the tokens of keys. No jax.

Its command holds a lock beside it until it ends. A command that is killed leaves both: the next
command of the same host that uses --state-dir removes them. It leaves those of other hosts alone,
where a lock may tell nothing of them.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
from io import BufferedWriter
from pathlib import Path

_LOCK = ".lock"


class BudgetsFolder:
    """A new folder; `close` removes it."""

    def __init__(self, state_dir: str | os.PathLike[str]):
        """Make the folder, and remove those of killed commands of this host. Raises OSError."""
        state, prefix = Path(state_dir), f"budgets-{_host_name()}-"
        own = re.compile(re.escape(prefix) + r"[0-9a-f]{16}" + re.escape(_LOCK))
        for lock in state.glob(f"{prefix}*{_LOCK}"):
            if own.fullmatch(lock.name):  # and not of a host whose name begins with this one's
                _remove_if_left(lock)
        self.path, self._lock = _new_folder(state, prefix)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_of(self.path).unlink(missing_ok=True)
        self._lock.close()


def _host_name() -> str:
    """Return this host's name as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _new_folder(state: Path, prefix: str) -> tuple[Path, BufferedWriter]:
    """Return a new folder and its lock, which is held."""
    while True:
        path = state / (prefix + secrets.token_hex(8))
        file = _held(_lock_of(path))
        if file is not None:  # else another command took it for one that is left
            path.mkdir(mode=0o700)
            return path, file


def _remove_if_left(lock: Path) -> None:
    """Remove a folder whose lock nobody holds."""
    with contextlib.suppress(OSError):  # of another user, or gone meanwhile
        file = _held(lock)
        if file is not None:
            with file:
                shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
                lock.unlink(missing_ok=True)


def _held(lock: Path) -> BufferedWriter | None:
    """Return the file of a lock that is held from now on, None where somebody else holds it."""
    file = lock.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno()))
    except OSError:
        is_there = False
    if not is_there:
        file.close()
        return None
    return file
