"""Folders for Unix sockets, whose paths may not be as long as other files'. No jax."""

import os
import tempfile
from pathlib import Path

_LONGEST_PATH = 107  # bytes of a Unix socket's path, on Linux
_LONGEST_NAME = 20  # bytes of a socket's name in such a folder
_SHORT = "/tmp"


def socket_folder(prefix: str) -> Path:
    """Return a new folder that only this user may enter, for sockets of short names.

    It is in the folder for temporary files (TMPDIR), or in /tmp if paths there are too long.
    Raises ConnectionError where /tmp cannot be used then.
    """
    made = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(made)) + 1 + _LONGEST_NAME <= _LONGEST_PATH:
        return made
    made.rmdir()
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=_SHORT))
    except OSError as error:
        raise ConnectionError(
            f"No folder for Unix sockets, whose paths have at most {_LONGEST_PATH} bytes: "
            f"{made.parent} is too long, and {_SHORT} cannot be used ({error.strerror}). Set "
            "TMPDIR to a shorter path."
        ) from error
