"""Facts of /proc on a server's processes and their leftovers. Linux only."""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

_LISTENS = 0x10000  # in the flags of /proc/net/unix


def in_session(session: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _session_of(entry) == session:
            found.append(int(entry.name))
    return sorted(found)


def _session_of(entry: Path) -> int | None:
    with contextlib.suppress(OSError):
        state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        return int(session) if state != "Z" else None
    return None


def unix_sockets(below: Path) -> dict[str, list[int]]:
    """Return the paths below a folder at which sockets listen, with the sockets' inodes."""
    found: dict[str, list[int]] = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[7].startswith(f"{below}/") and int(fields[3], 16) & _LISTENS:
            found.setdefault(fields[7], []).append(int(fields[6]))
    return found


def holders(inodes: Iterable[int], pids: Iterable[int]) -> list[int]:
    """Return those of the processes that hold one of the sockets."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return [pid for pid in pids if wanted & set(descriptors(pid))]


def descriptors(pid: int) -> list[str]:
    """Return what a process's descriptors are of; nothing of one that has gone."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def status_number(pid: int, name: str) -> int:
    """Return a number of /proc/PID/status: kB of VmRSS, Threads."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def orphans_in_shm(before: set[str]) -> set[str]:
    """Return what is new in /dev/shm and mapped or opened by no living process."""
    new = {f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before}
    if not new:
        return set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                maps = (entry / "maps").read_text()
                new = {name for name in new if name not in maps}
            new -= set(descriptors(int(entry.name)))
    return {name for name in new if os.path.exists(name)}
