"""Memory of a function's process: what it shares, holds alone, and lacks by an error of XLA."""

import os

_NO_MEMORY = "resource_exhausted", "out of memory", "out_of_memory"  # in an error of XLA


def backbone_memory(maps: str = "/proc/self/smaps") -> dict[str, int]:
    """Return bytes of this process's maps of shared pages: size, and its share of them (Pss)."""
    totals, ours = {"Size": 0, "Pss": 0}, False
    with open(maps) as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if "-" in name and " " in line.split(":")[0]:  # the head of a mapping
                ours = "lora_jax_pages" in line
            elif ours and name in totals:
                totals[name] += int(rest.split()[0]) << 10
    return totals


def private_bytes(path: str = "/proc/self/smaps_rollup") -> int:
    """Return bytes of memory that only this process holds; they are free when it has ended."""
    with open(path) as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def bounded_private_bytes(
    said: float, pid: int, parent: int, shared: int, folder: str = "/proc"
) -> int:
    """Return the bytes that a process says it alone holds, within what others can see of it.

    It holds at least its anonymous memory without that of its parent, of which it may have forked
    any part, and at most all of it and the pages of files. Of shared memory `shared` bytes, the
    backbone's, are not its own. A process that has ended holds nothing; where the system hides it,
    what it says counts.
    """
    try:
        own = _resident(f"{folder}/{pid}/status")
    except OSError:
        return int(max(0, said)) if _is_there(pid) else 0
    try:
        inherited = _resident(f"{folder}/{parent}/status")["RssAnon"]
    except OSError:  # it has ended, and shares nothing any more
        inherited = 0
    anonymous, apart = own["RssAnon"], max(0, own["RssShmem"] - shared)
    least = max(0, anonymous - inherited) + apart
    return int(min(max(least, said), anonymous + own["RssFile"] + apart))


def _resident(path: str) -> dict[str, int]:
    """Return bytes of a process's memory by kind, as any process of the user may read them."""
    sizes = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    with open(path) as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name in sizes:
                sizes[name] = int(rest.split()[0]) << 10
    return sizes


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_of_memory(text: str) -> bool:
    """Return whether an error of XLA says that the device has no memory left."""
    return any(words in text.lower() for words in _NO_MEMORY)
