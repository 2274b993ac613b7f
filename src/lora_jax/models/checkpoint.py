"""The tensors of a checkpoint folder: one safetensors file, or several with an index.

Headers are read once; bytes are read on demand into memory that the caller owns. Nothing is
memory-mapped, so that a page of a file never counts as memory of the process.
"""

import dataclasses
import json
import math
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from lora_jax.adapters.formats.safetensors_file import not_safetensors

Index = tuple[range, ...]  # one range per axis

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),  # powers of two: scales
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 4 << 20  # scratch for conversion and for slices that are not contiguous


@runtime_checkable
class AbstractTensor(Protocol):
    """A tensor of a checkpoint: as it is stored, or made of several (models.quantised)."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def form(self) -> Any:
        """Device form of a quantised matrix (models.quantised.forms), else None."""

    def read(self, index: Index, out: np.ndarray) -> None:
        """Fill `out` with the elements of the index, converted to out's dtype."""

    def read_part(self, part: str, index: Index, out: np.ndarray) -> None:
        """Fill `out` with elements of a part of the form."""


@dataclasses.dataclass(frozen=True)
class CheckpointTensor:
    """Location of a tensor: from byte `offset` of `file` on, in C order."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def form(self) -> None:
        """None: the tensor is as it is stored."""
        return None

    def read_part(self, part: str, index: Index, out: np.ndarray) -> None:
        raise AssertionError(f"{self.name} has no form and no part {part}")

    def seen_as(self, dtype: np.dtype, shape: tuple[int, ...]) -> "CheckpointTensor":
        """Return the same bytes as another dtype and shape.

        Raises:
            ValueError: they have another number of bytes.
        """
        stored_bytes = math.prod(self.shape) * self.dtype.itemsize
        if math.prod(shape) * dtype.itemsize != stored_bytes:
            raise ValueError(
                f"{self.name} has {stored_bytes} bytes, which are no {dtype.name} {tuple(shape)}."
            )
        return dataclasses.replace(self, dtype=dtype, shape=tuple(shape))

    def member(self, place: int) -> "CheckpointTensor":
        """Return the tensor at a place of the first axis."""
        member_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        offset = self.offset + place * member_bytes
        return dataclasses.replace(self, shape=self.shape[1:], offset=offset)

    def whole(self) -> np.ndarray:
        """Return all elements."""
        out = np.empty(self.shape, self.dtype)
        self.read(tuple(range(n) for n in self.shape), out)
        return out

    def rows(self, rows: range) -> np.ndarray:
        """Return some rows of the first axis."""
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        self.read((rows, *(range(n) for n in self.shape[1:])), out)
        return out

    def read(self, index: Index, out: np.ndarray) -> None:
        """Fill `out` with the elements of the index, converted to out's dtype."""
        with open(self.file, "rb", buffering=0) as file:
            if self.shape:
                self._read(file, self.offset, self.shape, index, out)
            else:
                out[...] = self._bytes(file, self.offset, self.dtype.itemsize)[0]

    def _read(
        self, file: FileIO, offset: int, shape: tuple[int, ...], index: Index, out: np.ndarray
    ) -> None:
        """Read some rows of the first axis at a time, or row by row where one row is large."""
        row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        whole_rows = all(r == range(n) for r, n in zip(index[1:], shape[1:], strict=True))
        if row_bytes > _CHUNK_BYTES and len(shape) > 1 and not whole_rows:
            for position, row in enumerate(index[0]):
                self._read(file, offset + row * row_bytes, shape[1:], index[1:], out[position])
            return
        in_place = whole_rows and index[0].step == 1 and out.dtype == self.dtype
        if in_place and out.flags.c_contiguous:
            file.seek(offset + index[0].start * row_bytes)
            self._fill(file, out.reshape(-1).view(np.uint8))
            return
        rest = tuple(slice(r.start, r.stop, r.step) for r in index[1:])
        span = max(1, _CHUNK_BYTES // max(1, row_bytes) // index[0].step)
        for position in range(0, len(index[0]), span):
            rows = index[0][position : position + span]
            size = (rows[-1] + 1 - rows[0]) * row_bytes
            flat = self._bytes(file, offset + rows[0] * row_bytes, size)
            part = flat.reshape(-1, *shape[1:])[(slice(None, None, rows.step), *rest)]
            out[position : position + len(rows)] = part.astype(out.dtype, copy=False)

    def _bytes(self, file: FileIO, offset: int, size: int) -> np.ndarray:
        buffer = np.empty(size, np.uint8)
        file.seek(offset)
        self._fill(file, buffer)
        return buffer.view(self.dtype)

    def _fill(self, file: FileIO, buffer: np.ndarray) -> None:
        view, done = memoryview(buffer), 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise ValueError(f"{self.file.name} ends inside tensor {self.name}.")
            done += count


def read_header(file: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors of one safetensors file.

    Raises:
        ValueError: the file is not what its header says, or a dtype is not known.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if size >= 8 and length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} is {not_safetensors(first)}.")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{file.name} is truncated, or is not a safetensors file.")
        try:
            header = json.loads(opened.read(length))
        except ValueError as error:
            raise ValueError(f"{file.name} has a header that is not JSON.") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} has a header that is not an object.")
    header.pop("__metadata__", None)
    data = 8 + length
    return {name: _stored(file, name, entry, data, size) for name, entry in header.items()}


def _stored(file: Path, name: str, entry: Any, data: int, size: int) -> CheckpointTensor:
    """Return one entry of a header after checking it against the file's size."""
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
            raise ValueError("sizes are not counts")
    except (KeyError, TypeError, ValueError) as error:
        text = str(entry)[:200]
        raise ValueError(f"{file.name}: the header's entry of {name} is wrong: {text}.") from error
    if kind not in DTYPES:
        supported = ", ".join(DTYPES)
        raise ValueError(f"{file.name}: {name} has dtype {kind}, supported are {supported}.")
    if end - begin != math.prod(shape) * DTYPES[kind].itemsize or end > size - data:
        raise ValueError(
            f"{file.name}: {name} {shape} {kind} does not fit bytes {begin} to {end} of "
            f"{size - data}: the file is truncated or wrong."
        )
    return CheckpointTensor(name, file, DTYPES[kind], shape, data + begin)


class Checkpoint:
    """Every tensor of a folder by name. Names without the leading `model.` are found with it."""

    def __init__(self, folder: Path):
        self.tensors: dict[str, Any] = {}
        for file in checkpoint_files(folder):
            header = read_header(file)
            twice = sorted(self.tensors.keys() & header.keys())
            if twice:
                raise ValueError(f"{file.name} repeats tensors of another file: {twice[:5]}.")
            self.tensors.update(header)
        bare = not any(name.startswith(("model.", "transformer.")) for name in self.tensors)
        self._prefix = "model." if bare else ""

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self.tensors

    def __getitem__(self, name: str) -> AbstractTensor:
        return self.tensors[self._stored_name(name)]

    def _stored_name(self, name: str) -> str:
        return name.removeprefix(self._prefix) if name not in self.tensors else name


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder.

    Raises:
        ValueError: there are none, or the index names a file that is absent or elsewhere.
    """
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
        hint = f" {pickles[0]} is not read: unpickling runs code." if pickles else ""
        hint += " Save the model as safetensors; save_pretrained does by default." if hint else ""
        raise ValueError(f"{folder.name} holds neither {SINGLE} nor {INDEX}.{hint}")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{INDEX} names {name!r}, which is no file of {folder.name}.")
    return [folder / name for name in names]
