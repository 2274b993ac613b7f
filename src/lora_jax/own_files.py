"""Files of a cache whose content is executed: only this user may change them, and damage is found.

A folder is checked as ssh checks its own: it and every folder above it belong to this user or to
root, and nobody else may write them (above it, a sticky folder such as /tmp will do). A file is
written under another name, flushed and renamed; its SHA-256 stands beside it, as `sha256sum` writes
it, and a file without it, or with another, does not count.
"""

import contextlib
import hashlib
import os
import secrets
import stat
from io import BufferedReader
from pathlib import Path

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DIGEST_SUFFIX = ".sha256"


class UnsafeFolderError(OSError):
    """Another user may change what lies in the folder; the message says what to change."""


def own_folder(path: Path) -> Path:
    """Return the folder, links followed; what is missing of it is made with mode 0700.

    Raises:
        UnsafeFolderError: another user owns it or may write it, or a folder above it.
        OSError: it cannot be made.
    """
    real = Path(os.path.realpath(path))
    for folder in (*reversed(real.parents), real):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _check_folder(folder, is_last=folder == real)
    return real


def _check_folder(folder: Path, *, is_last: bool) -> None:
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafeFolderError(
            f"{folder} (mode {mode:04o}) belongs to uid {status.st_uid}, not to uid "
            f"{os.geteuid()} or root: change its owner, or name another folder"
        )
    if mode & _OTHERS_MAY_WRITE and (is_last or not mode & stat.S_ISVTX):
        raise UnsafeFolderError(
            f"other users may write {folder} (mode {mode:04o}): run chmod go-w {folder}, or name "
            "another folder"
        )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 so that after a crash it is there whole or not at all."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        _rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def publish(part: Path, path: Path) -> None:
    """Rename a finished file to `path`, with mode 0600 and its digest beside it."""
    part.chmod(0o600)
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    # The digest first: between the two renames the file does not count.
    write_whole(digest_path(path), f"{digest}  {path.name}\n".encode())
    _rename(part, path)


def is_whole(path: Path) -> bool:
    """Return whether a published file is there, unchanged, and nobody else's."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not _is_own_file(os.fstat(file.fileno())):
                return False
            return _has_digest(path, file)
    except (OSError, ValueError):
        return False


def is_unchanged(path: Path) -> bool:
    """Return whether a published file is there whole, whoever owns it: an installed one, say."""
    try:
        with path.open("rb") as file:
            return _has_digest(path, file)
    except (OSError, ValueError):
        return False


def _has_digest(path: Path, file: BufferedReader) -> bool:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return digest_path(path).read_text().split()[:1] == [digest]


def _is_own_file(status: os.stat_result) -> bool:
    others = status.st_mode & _OTHERS_MAY_WRITE
    return stat.S_ISREG(status.st_mode) and status.st_uid in (0, os.geteuid()) and not others


def digest_path(path: Path) -> Path:
    """Return where the SHA-256 of a published file stands."""
    return path.with_name(path.name + _DIGEST_SUFFIX)


def _rename(part: Path, path: Path) -> None:
    """Rename within a folder, and have the folder's new content on the disk."""
    part.replace(path)
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
