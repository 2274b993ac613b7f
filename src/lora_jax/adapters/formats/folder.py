"""Opening the files of an adapter's folder without being led outside of it. No jax.

Each file is read once, whole, into memory; what is hashed is what is parsed. Messages name files
by their name in the folder, never by their path.

A file's hash is its sha256, or from one piece of 16 MiB on `pieces-` and the sha256 of the sha256
of its pieces: several threads read and hash those, where one sha256 takes 0.6 s for a GB.
"""

import contextlib
import hashlib
import itertools
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

PIECE_BYTES = 16 << 20
_THREADS = 8
# Takes a function that reads so many bytes from a place on, and the file's size.
Check = Callable[[Callable[[int, int], bytes], int], None]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def pickle_hint(names: Sequence[str]) -> str:
    """Return a sentence about files that only unpickling could read, '' where there are none."""
    if not names:
        return ""
    return (
        f" {', '.join(names)} is not read: unpickling runs code. Save the adapter as safetensors; "
        "PEFT's save_pretrained does by default."
    )


class AdapterFolder:
    """One folder, read file by file; `hashes` collects the hash of each file read.

    With a `root`, the folder and every file must lie inside it after links are followed.
    """

    def __init__(self, path: Path, root: Path | None = None):
        """Raise FileNotFoundError when there is no such folder, ValueError when it escapes."""
        self._real = os.path.realpath(path)
        self._root = os.path.realpath(root) if root else None
        if not self._inside(self._real):
            raise ValueError(
                "the path leads outside of the adapter directory: give a folder below --lora-dir."
            )
        if not os.path.isdir(self._real):
            # Who may name any folder is told where it was looked for; others only what they said.
            shown = path.name if root else str(path.absolute())
            raise FileNotFoundError(f"there is no folder {shown!r}.")
        self.name = os.path.basename(self._real)
        self.hashes: dict[str, str] = {}
        self.num_bytes = 0
        self._names: dict[str, tuple[str, ...]] = {}  # of files, by the folder below this one

    def files(self, below: str = "") -> tuple[str, ...]:
        """Return the names in the folder, or in the one `below` it, in order, as first seen."""
        if (names := self._names.get(below)) is not None:
            return names
        inner = self._path(below)
        handle = os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self._root and not self._is_inside_opened(handle, inner):
                raise ValueError(f"{below} leads outside of the adapter directory.")
            self._names[below] = names = tuple(sorted(os.listdir(handle)))
            return names
        finally:
            os.close(handle)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the whole file; ValueError when absent, not a plain file, outside or too big."""
        return bytes(self.view(name, max_bytes))

    def view(self, name: str, max_bytes: int, check: Check | None = None) -> memoryview:
        """Return what `read` does, read-only, without a second copy.

        `check` may refuse the file by its size and its beginning before the rest is read.
        """
        try:
            # Non-blocking, or opening a pipe would wait for its writer for ever.
            handle = os.open(self._path(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"{name} cannot be opened: {error.strerror}.") from None
        try:
            status = os.fstat(handle)
            self._check_opened(name, handle, status, max_bytes)
            if check is not None:
                check(lambda start, count: os.pread(handle, count, start), status.st_size)
            data, self.hashes[name] = _read_hashed(handle, status.st_size)
        finally:
            os.close(handle)
        self.num_bytes += len(data)
        return data

    def digest(self) -> str:
        """Return sha256 over the names and hashes of all files read so far."""
        text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(self.hashes.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def pickles(self) -> tuple[str, ...]:
        """Return the files that only unpickling could read."""
        return tuple(name for name in self.files() if name.endswith(_PICKLES))

    def _check_opened(self, name: str, handle: int, status: os.stat_result, max_bytes: int) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name} is not a plain file.")
        if self._root and not self._is_inside_opened(handle, self._path(name)):
            raise ValueError(f"{name} leads outside of the adapter directory.")
        if status.st_size > max_bytes:
            raise ValueError(f"{name} has {status.st_size} bytes, at most {max_bytes} allowed.")

    def _path(self, name: str) -> str:
        return os.path.join(self._real, name)

    def _inside(self, real: str) -> bool:
        root = self._root
        return root is None or real == root or real.startswith(os.path.join(root, ""))

    def _is_inside_opened(self, handle: int, path: str) -> bool:
        """Return whether what was opened is inside: it, not what the path leads to by now."""
        # One call of the kernel, where to follow the links of a path takes one for each part.
        with contextlib.suppress(OSError):
            if self._inside(os.readlink(f"/proc/self/fd/{handle}")):
                return True
        real, opened = os.path.realpath(path), os.fstat(handle)
        try:
            stats = os.stat(real)
        except OSError:
            return False
        same = (stats.st_dev, stats.st_ino) == (opened.st_dev, opened.st_ino)
        return same and self._inside(real)


def _read_hashed(handle: int, size: int) -> tuple[memoryview, str]:
    """Return the first `size` bytes of a file, or all where it has become shorter; their hash."""
    view = memoryview(np.empty(size, np.uint8))  # memory that nobody has filled with zeros before

    def piece(start: int) -> tuple[int, bytes]:
        count = _read_at(handle, view[start : min(size, start + PIECE_BYTES)], start)
        return count, hashlib.sha256(view[start : start + count]).digest()

    starts = range(0, max(1, size), PIECE_BYTES)
    if len(starts) == 1:  # a thread takes longer to start than a small file to be read
        pieces = [piece(0)]
    else:
        with ThreadPoolExecutor(_THREADS) as threads:
            pieces = list(threads.map(piece, starts))
    whole = list(itertools.takewhile(lambda pair: pair[0] == PIECE_BYTES, pieces))
    rest = pieces[len(whole) : len(whole) + 1]  # behind it the file has nothing any more
    digests = [digest for count, digest in whole + rest if count or not whole]
    end = sum(count for count, _ in whole + rest)
    if len(digests) == 1:
        return view[:end].toreadonly(), digests[0].hex()
    return view[:end].toreadonly(), f"pieces-{hashlib.sha256(b''.join(digests)).hexdigest()}"


def _read_at(handle: int, buffer: memoryview, start: int) -> int:
    """Fill the buffer with a file's bytes from `start` on; return how many there are."""
    end = 0
    while end < len(buffer) and (count := os.preadv(handle, [buffer[end:]], start + end)):
        end += count
    return end
