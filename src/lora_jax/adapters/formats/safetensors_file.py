"""Strict reading of a safetensors file that a stranger wrote. No jax.

Format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the data, which the tensors cover without gaps. The
safetensors library is stricter than most but names neither file nor tensor in its errors, takes
headers of 100 MB and has no bfloat16 for numpy, hence this reader.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.json_structure import too_many_values

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_NAME = 512
_MAX_DIMS = 8
_MIN_HEADER_BYTES, _ENTRY_BYTES = 1 << 20, 320  # an entry has a name, numbers and spaces
_MOST_NAMES_BYTES = 100_000_000  # of a header that only gives names
_MIN_VALUES, _ENTRY_VALUES = 1 << 16, 20  # JSON values
Read = Callable[[int, int], bytes]  # of so many bytes from a place on
_Span = tuple[np.dtype, tuple[int, ...], int, int]  # dtype, shape, first and last byte


@dataclasses.dataclass(frozen=True)
class FileLimits:
    """Limits of a file; more is a ValueError before any data is read."""

    max_header_bytes: int = 32 << 20
    max_tensors: int = 200_000
    max_data_bytes: int | None = None

    def for_model(self, max_tensors: int, max_data_bytes: int) -> "FileLimits":
        """Return the limits of a file that one model can use, never more than these."""
        tensors = min(self.max_tensors, max_tensors)
        header = max(_MIN_HEADER_BYTES, tensors * _ENTRY_BYTES)
        return FileLimits(min(self.max_header_bytes, header), tensors, max_data_bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterTensor:
    """One tensor of a file, its shape known and its data not yet looked at."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    _data: memoryview
    is_blank: bool = False  # zeros that stand for values, which need no look

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return len(self._data)

    def read(self) -> np.ndarray:
        """Return a read-only view of the values; ValueError when one is NaN or infinite."""
        values = np.frombuffer(self._data, self.dtype).reshape(self.shape)
        if not self.is_blank and not all_finite(values):
            raise ValueError(f"{self.name} has values that are NaN or infinite.")
        return values


def all_finite(values: np.ndarray) -> bool:
    """Return np.isfinite(values).all() of 16 or 32 bits, by the bits: much faster in bfloat16.

    As signed numbers the bits of a NaN or an infinity are at least those of infinity, and as
    unsigned ones those of minus infinity, if any are.
    """
    if not values.size:
        return True
    size = values.dtype.itemsize
    most = [np.asarray(sign * np.inf, values.dtype).view(f"u{size}") for sign in (1, -1)]
    signed, unsigned = values.view(f"i{size}"), values.view(f"u{size}")
    return bool(signed.max() < most[0] and unsigned.max() < most[1])


@dataclasses.dataclass(frozen=True, eq=False)
class Header:
    """Header of a file: each tensor and its place."""

    raw: bytes  # with the 8 bytes of its length
    file_bytes: int
    spans: dict[str, _Span]  # in the order of the data
    metadata: dict[str, str]  # what the writer noted beside the tensors


def read_header(read: Read, file_bytes: int, file_name: str, limits: FileLimits) -> Header:
    """Return the header of a file of this size, whose tensors are all of its data.

    Nothing but the header is read. ValueError naming what is wrong with it.
    """
    with naming(file_name):
        return _header(_raw_header(read, file_bytes, limits), file_bytes, limits)


def tensor_names(path: Path) -> tuple[str, ...]:
    """Return the names of a file's tensors, of which nothing else is looked at.

    Raises OSError, and ValueError for a file whose header is none.
    """
    with naming(path.name):
        return names_in(header_text(path))


def header_text(path: Path) -> bytes:
    """Return the JSON of a file's header, unchecked; files of one structure mostly have the same.

    Raises OSError, and ValueError for a header of more than 100 MB.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_NAMES_BYTES:
            raise ValueError(f"a header of {length} bytes, at most {_MOST_NAMES_BYTES} allowed.")
        return file.read(length)


def names_in(text: bytes) -> tuple[str, ...]:
    """Return the names of tensors in `header_text`; ValueError where it is no header."""
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("a header that is nested too deep.") from None
    if not isinstance(header, dict):
        raise ValueError("a header that is not an object.")
    return tuple(name for name in header if name != "__metadata__")


def _header(raw: bytes, file_bytes: int, limits: FileLimits) -> Header:
    header = _json(raw[8:], limits)
    metadata = header.pop("__metadata__", None)
    spans = _spans(header, file_bytes - len(raw), limits)
    return Header(raw, file_bytes, spans, _texts(metadata))


@dataclasses.dataclass(frozen=True, eq=False)
class WholeFile:
    """Bytes of a file, and its header; None where the caller knows such headers."""

    data: memoryview
    limits: FileLimits
    header: Header | None
    is_blank: bool = False  # all bytes behind the header are zeros, whatever the file has


def blank_file(path: Path, max_bytes: int, limits: FileLimits) -> WholeFile:
    """Return a file with its own header, and zeros in place of its data, which is not read.

    Raises OSError, and ValueError as `read_whole` does for the size and the header.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{path.name} has {size} bytes, at most {max_bytes} allowed.")
        with naming(path.name):
            read = functools.partial(_read_at, file.fileno())
            raw = _raw_header(read, size, limits)
            header = _header(raw, size, limits)
    data = np.zeros(size, np.uint8)  # pages that nobody has written take no memory
    data[: len(raw)] = np.frombuffer(raw, np.uint8)
    return WholeFile(memoryview(data).toreadonly(), limits, header, is_blank=True)


def _read_at(handle: int, start: int, count: int) -> bytes:
    return os.pread(handle, count, start)


class Knows(Protocol):
    """Answers whether the header of a file of so many bytes is known, and need not be parsed."""

    def __call__(self, raw: bytes, file_bytes: int, /) -> bool: ...


def parse(
    buffer: bytes | memoryview, file_name: str, limits: FileLimits, header: Header | None = None
) -> dict[str, AdapterTensor]:
    """Return the tensors of a whole file by name; ValueError naming what is wrong with it.

    `header` is what `read_header` found before; a file that changed since is read anew.
    """
    return tensors_of(WholeFile(memoryview(buffer), limits, header), file_name)[0]


def read_file(
    folder: AdapterFolder, file_name: str, max_bytes: int, limits: FileLimits
) -> dict[str, AdapterTensor]:
    """Return the tensors of a file of a folder; its header is checked before its data is read."""
    return tensors_of(read_whole(folder, file_name, max_bytes, limits), file_name)[0]


def read_whole(
    folder: AdapterFolder,
    file_name: str,
    max_bytes: int,
    limits: FileLimits,
    knows: Knows | None = None,
) -> WholeFile:
    """Return a file of a folder; a header that is not known is checked before its data is read."""
    headers: list[Header | None] = []

    def check(read: Read, file_bytes: int) -> None:
        with naming(file_name):
            raw = _raw_header(read, file_bytes, limits)
            is_known = knows is not None and knows(raw, file_bytes)
            headers.append(None if is_known else _header(raw, file_bytes, limits))

    data = folder.view(file_name, max_bytes, check)
    return WholeFile(data, limits, headers[0])


def tensors_of(file: WholeFile, file_name: str) -> tuple[dict[str, AdapterTensor], dict[str, str]]:
    """Return the tensors of a file by name, and the texts noted beside them; ValueError as parse.

    A header that changed while the file was read is read anew.
    """
    buffer, header = file.data, file.header
    same = header and header.file_bytes == len(buffer) and buffer[: len(header.raw)] == header.raw
    if not header or not same:

        def read(start: int, count: int) -> bytes:
            return bytes(buffer[start : start + count])

        header = read_header(read, len(buffer), file_name, file.limits)
    data = buffer[len(header.raw) :]
    tensors = {
        name: AdapterTensor(name, dtype, shape, data[first:last], file.is_blank)
        for name, (dtype, shape, first, last) in header.spans.items()
    }
    return tensors, header.metadata


@contextlib.contextmanager
def naming(file_name: str) -> Iterator[None]:
    """Put the file's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file_name}: {error}") from None


_LARGEST_HEADER = 100_000_000  # bytes, by the format itself


def not_safetensors(first: bytes) -> str:
    """Return what is wrong with a file of these first bytes, and what to do."""
    if first.startswith(b"version "):
        return "a Git LFS pointer in place of the file; fetch the file by `git lfs pull`"
    length = int.from_bytes(first, "little")
    return (
        f"not a safetensors file: its first 8 bytes give a header of {length} bytes, and at most "
        f"{_LARGEST_HEADER} are allowed"
    )


def _raw_header(read: Read, file_bytes: int, limits: FileLimits) -> bytes:
    """Return the length and the JSON of a header, as they are."""
    if file_bytes < 8:
        raise ValueError(f"not a safetensors file, it has only {file_bytes} bytes.")
    first = read(0, 8)
    (length,) = struct.unpack("<Q", first)
    if length > _LARGEST_HEADER:
        raise ValueError(f"{not_safetensors(first)}.")
    if length > limits.max_header_bytes:
        raise ValueError(f"header of {length} bytes, at most {limits.max_header_bytes} allowed.")
    if 8 + length > file_bytes:
        raise ValueError(f"truncated: header of {length} bytes in a file of {file_bytes} bytes.")
    raw = read(0, 8 + length)
    if len(raw) < 8 + length:
        raise ValueError("truncated: the file became shorter while it was read.")
    return raw


def _json(text: bytes, limits: FileLimits) -> dict[str, Any]:
    """Return the header's entries by name."""
    values = max(_MIN_VALUES, _ENTRY_VALUES * limits.max_tensors)
    if too_many_values(text, values):
        raise ValueError(f"the header holds more than {values} JSON values.")
    try:
        header = json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("the header is not valid JSON.") from None
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object.")
    return header


def _texts(metadata: Any) -> dict[str, str]:
    """Return the entries of `__metadata__` that are text; libraries write nothing else."""
    entries = metadata.items() if isinstance(metadata, dict) else ()
    return {name: value for name, value in entries if isinstance(value, str)}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name stands twice in the header.")
    return dict(pairs)


def _no_constant(text: str) -> None:
    raise ValueError(f"the header holds {text}.")


def _spans(header: dict[str, Any], data_bytes: int, limits: FileLimits) -> dict[str, _Span]:
    """Return the place of each tensor in the data, which they cover without gaps."""
    if len(header) > limits.max_tensors:
        raise ValueError(f"{len(header)} tensors, at most {limits.max_tensors} allowed.")
    for name in header:
        if len(name) > _MAX_NAME or not name.isprintable() or not name:
            raise ValueError(f"a tensor name is empty, too long or not printable: {name[:80]!r}.")
    spans = {name: _span(name, entry) for name, entry in header.items()}
    spans = dict(sorted(spans.items(), key=lambda item: item[1][2]))
    end = 0
    for name, (_, _, first, last) in spans.items():
        if first != end:
            raise ValueError(f"{name} starts at byte {first} of the data, expected {end}.")
        if last > data_bytes:
            raise ValueError(f"truncated: {name} ends at byte {last}, the data at {data_bytes}.")
        end = last
    if end != data_bytes:
        raise ValueError(f"{data_bytes - end} bytes after the last tensor belong to none.")
    if limits.max_data_bytes is not None and data_bytes > limits.max_data_bytes:
        raise ValueError(
            f"tensors of {data_bytes} bytes; {limits.max_data_bytes} are the most that an adapter "
            "of this base model and rank can have."
        )
    return spans


def _span(name: str, entry: Any) -> _Span:
    """Return dtype, shape, first and last byte of one header entry."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the header entry of {name} is not dtype, shape and data_offsets.")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{name} has dtype {str(code)[:20]}; only {', '.join(DTYPES)} are read.")
    if not _sizes(shape, least=1) or len(shape) > _MAX_DIMS:
        raise ValueError(f"{name} has a shape that is not a short list of positive integers.")
    if not _sizes(offsets, least=0) or len(offsets) != 2:
        raise ValueError(f"{name} has data_offsets that are not two integers.")
    dtype, (first, last) = DTYPES[code], offsets
    want = math.prod(shape) * dtype.itemsize
    if last - first != want:
        raise ValueError(
            f"{name} with shape {tuple(shape)} takes {want} bytes, its offsets say {last - first}."
        )
    return dtype, tuple(shape), first, last


def _sizes(value: Any, least: int) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= least for n in value)
