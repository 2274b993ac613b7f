"""The process of a role on another host: `python -m serving.cluster.far.member`.

An actor starts it and writes to its standard input what it is to do; the end of that input is the
end of the actor. It speaks with the command's host by its own connections: no Ray is here.
"""

import ctypes
import os
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from serving.cluster.far.switchboard import Ticket

EXIT_LOST = 75  # as serving.runtime.gang has it: what started this process has gone
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def call_bytes(name: str, target: Callable[..., None], args: tuple[Any, ...]) -> bytes:
    """Return what tells a process its name, and to call a module's function with these arguments.

    Tickets among them become connections.
    """
    payload = pickle.dumps((name, target, args), pickle.HIGHEST_PROTOCOL)
    return struct.pack("<Q", len(payload)) + payload


def main() -> None:
    """Do what the standard input says, and end with it; status 1 where it cannot start."""
    die_with_parent()
    source = sys.stdin.buffer
    (length,) = struct.unpack("<Q", source.read(8))
    payload = source.read(length)
    threading.Thread(target=_watch, args=(source.fileno(),), name="actor", daemon=True).start()
    name, target, args = pickle.loads(payload)
    _show(name)
    try:
        args = [arg.redeem() if isinstance(arg, Ticket) else arg for arg in args]
    except ConnectionError as error:
        raise SystemExit(f"{name} cannot start. {error}") from None
    target(*args)


def die_with_parent() -> None:
    """Let the kernel kill this process with its parent, also when it is stopped (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _show(name: str) -> None:
    """Let ps and top show the role (Linux)."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _watch(descriptor: int) -> None:
    """End this process at the end of its input; no lock of Python's is held meanwhile."""
    while os.read(descriptor, 64):
        pass
    os._exit(EXIT_LOST)


if __name__ == "__main__":
    main()
