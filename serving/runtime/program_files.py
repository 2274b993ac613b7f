"""Compiled programs in a folder, as jax's persistent cache wants them: whole, checked and bounded.

A file is a SHA-256, of the program's key and the program, and the program. One that does not agree
is removed, and jax compiles it again: jax itself would hand it to XLA, or, where XLA refuses it,
keep it for ever. With the key in it, a file under another program's name is not that program.
"""

import contextlib
import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_jax import own_files

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size
# Not ".program": those of older builds have digests without a name, and would be called damaged.
_SUFFIX = ".compiled"
_STEP_KEY = re.compile("[0-9a-f]{64}")
_MOST_STEPS = 256  # an engine asks for some dozens


def step_keys(given: Any) -> list[str]:
    """Return what in a list that another process wrote is a key of a step: a SHA-256 in hex.

    Nothing else may name a file that is read as code.
    """
    if not isinstance(given, list):
        return []
    keys = (key for key in given[:_MOST_STEPS] if isinstance(key, str))
    return list(dict.fromkeys(key for key in keys if _STEP_KEY.fullmatch(key)))


class ProgramFiles:
    """Programs by jax's keys; the ones used longest ago are removed first. Needs no lock."""

    def __init__(self, folder: Path, max_bytes: int, *, writes: bool = True, demands: bool = False):
        """Without `writes` nothing in the folder changes; with `demands` a missing
        program is an error for the user of the files, which must not make it.
        """
        self._path = folder  # jax says it in its messages
        self._max_bytes = max_bytes
        self.writes, self.demands = writes, demands
        self._reading = threading.local()

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return self._path

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Let this thread find no program: all that it compiles meanwhile is compiled anew."""
        self._reading.off = True
        try:
            yield
        finally:
            self._reading.off = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[bytes]]:
        """Yield a list of the programs that this thread finds meanwhile."""
        self._reading.found = found = []
        try:
            yield found
        finally:
            self._reading.found = None

    def get(self, key: str) -> bytes | None:
        """Return a program, or None where there is none or its file is damaged."""
        if getattr(self._reading, "off", False):
            return None
        try:
            program = self._read(key, self._file(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("A program is compiled again, its file cannot be read: %s", error)
            return None
        found = getattr(self._reading, "found", None)
        if program is not None and found is not None:
            found.append(program)
        return program

    def _read(self, key: str, path: Path) -> bytes | None:
        data = path.read_bytes()
        program = data[_DIGEST_BYTES:]
        if _digest(key, program) != data[:_DIGEST_BYTES]:
            logger.warning(
                "%s is damaged or holds another program, the program is compiled again", path
            )
            if self.writes:
                path.unlink(missing_ok=True)
            return None
        if self.writes:
            _touch(path)
        return program

    def put(self, key: str, value: bytes) -> None:
        """Keep a program, unless it is larger than all of them may be together."""
        size = len(value) + _DIGEST_BYTES
        if size > self._max_bytes or not self.writes:
            return
        self._make_room(size)
        own_files.write_whole(self._file(key), _digest(key, value) + value)

    def _file(self, key: str) -> Path:
        if Path(key).name != key:
            raise ValueError(f"The key of a program must be a file's name, got {key!r}.")
        return self._path / f"{key}{_SUFFIX}"

    def _make_room(self, size: int) -> None:
        """Remove files, older releases' and unfinished ones too, until `size` bytes fit."""
        files = []
        for entry in os.scandir(self._path):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # another process has removed it
                continue
            files.append((status.st_mtime_ns, status.st_size, entry.path))
        total = size + sum(num_bytes for _, num_bytes, _ in files)
        for _, num_bytes, path in sorted(files):
            if total <= self._max_bytes:
                return
            Path(path).unlink(missing_ok=True)
            total -= num_bytes


def _digest(key: str, program: bytes) -> bytes:
    digest = hashlib.sha256(f"{key}\n".encode())
    digest.update(program)
    return digest.digest()


def _touch(path: Path) -> None:
    """Note that a file was used."""
    try:
        os.utime(path)
    except OSError as error:  # removed meanwhile, or a folder that may only be read
        logger.debug("%s: %s", path, error)
