"""Layouts of adapter files that were read, by which files of the same structure are read again.

Adapters that were trained alike have weights files of one header and configs that mean the same,
and so has a file that is read again after its weights left the host's memory. Where each matrix
lies in such a file, what the table on the device says of it, and its report are known then. Only
its bytes are read, hashed and checked, and its matrices copied to their places. No jax.
"""

import collections
import dataclasses
import hashlib
import threading
from collections.abc import Iterator

import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.adapters.formats.peft_experts import GATE, UP, are_apart
from lora_jax.adapters.formats.safetensors_file import WholeFile, all_finite
from lora_jax.adapters.host_rows import HostRun
from lora_jax.adapters.weights import (
    AdapterReport,
    AdapterWeights,
    SiteColumns,
    SiteWeights,
    block_order,
    block_room,
)

_Pair = tuple[int, int]  # matrices by their numbers in a block


@dataclasses.dataclass(frozen=True, eq=False)
class _Matrix:
    """Places of a matrix in a file and in a block, in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    first: int  # in the file
    strides: tuple[int, ...]  # in the file
    start: int  # in the block


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """A HostRun whose rows are those of a block."""

    width: int
    numbers: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # in the block

    def of(self, block: np.ndarray) -> HostRun:
        rows = np.ndarray(self.shape, self.dtype, block, self.start)
        return HostRun(self.width, self.numbers, self.counts, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class FileLayout:
    """Layout of the weights file of an adapter that has LoRA and nothing else."""

    catalogue: LoraCatalogue  # of the base model that it was read for
    dtype: np.dtype  # of all tensors
    data: int  # first byte behind the header
    matrices: tuple[_Matrix, ...]  # in the order of a block
    num_bytes: int  # of a block
    sites: tuple[tuple[tuple[str, int], _Pair, float], ...]
    experts: tuple[_Pair, ...]  # B of gate and of up, which are not apart (peft_experts)
    report: AdapterReport
    demand: tuple[tuple[int, int], ...]
    site_columns: SiteColumns
    rows_by_width: dict[int, int]
    runs: tuple[_Run, ...]

    def weights(self, file: memoryview, folder: AdapterFolder) -> AdapterWeights | None:
        """Return the adapter of a file of this layout, in one block; `folder` has read its files.

        None where the values mean another layout, or are not finite.
        """
        if not all_finite(np.frombuffer(file, self.dtype, offset=self.data)):
            return None
        block, found = np.empty(self.num_bytes, np.uint8), []
        for matrix in self.matrices:
            bits = f"u{matrix.dtype.itemsize}"  # numpy copies these faster than bfloat16
            source = np.ndarray(matrix.shape, bits, file, matrix.first, matrix.strides)
            np.ndarray(matrix.shape, bits, block, matrix.start)[...] = source
            found.append(np.ndarray(matrix.shape, matrix.dtype, block, matrix.start))
        if any(are_apart(found[gate], found[up]) for gate, up in self.experts):
            return None
        sites = {key: SiteWeights(found[a], found[b], scale) for key, (a, b), scale in self.sites}
        runs = tuple(run.of(block) for run in self.runs)
        report = dataclasses.replace(
            self.report,
            folder=folder.name,
            digest=folder.digest(),
            files=dict(folder.hashes),
            file_bytes=folder.num_bytes,
        )
        made = AdapterWeights(sites, report)
        return made.known_as(self.demand, self.site_columns, self.rows_by_width, runs)


class FileLayouts:
    """Layouts of the files that were read last; any thread may use it."""

    def __init__(self, most: int = 64):
        """`most` bounds the layouts that are kept, of which those used last stay."""
        self._most = most
        self._lock = threading.Lock()
        self._layouts: collections.OrderedDict[bytes, FileLayout] = collections.OrderedDict()

    def find(self, key: bytes) -> FileLayout | None:
        """Return the layout of this key, if it is known."""
        with self._lock:
            if key in self._layouts:
                self._layouts.move_to_end(key)
            return self._layouts.get(key)

    def keep(self, key: bytes, layout: FileLayout) -> None:
        """Keep a layout by its key."""
        with self._lock:
            self._layouts[key] = layout
            if len(self._layouts) > self._most:
                self._layouts.popitem(last=False)


class LayoutSearch:
    """Search for the layout of one file, by its header and all else that decides its meaning."""

    def __init__(self, layouts: FileLayouts, catalogue: LoraCatalogue, meaning: str):
        self._layouts, self._catalogue, self._meaning = layouts, catalogue, meaning.encode()
        self._header, self._file_bytes, self._key = b"", 0, b""
        self._found: FileLayout | None = None

    def __call__(self, raw: bytes, file_bytes: int, /) -> bool:
        """Return whether a layout is known of a file of this header and of so many bytes."""
        parts = raw, str(file_bytes).encode(), self._meaning
        hashes = (hashlib.sha256(part).digest() for part in parts)
        self._header, self._file_bytes, self._key = raw, file_bytes, b"".join(hashes)
        found = self._layouts.find(self._key)
        self._found = found if found and found.catalogue is self._catalogue else None
        return self._found is not None

    def weights(self, file: WholeFile, folder: AdapterFolder) -> AdapterWeights | None:
        """Return the adapter of the file; None: it is to be read without a layout.

        That tells, too, what is wrong with a file whose values no layout takes.
        """
        if self._found is None or not self._is_of(file):
            return None
        return self._found.weights(file.data, folder)

    def learn(self, file: WholeFile, found: AdapterWeights, packed: AdapterWeights) -> None:
        """Keep the layout of a file that was read without one, if it can be known.

        `found` has matrices that are views of the file's tensors, `packed` the same ones in one
        block. No layout is kept of a file whose matrices were computed from its tensors, or do
        not have all of their values.
        """
        if not self._is_of(file):
            return
        layout = _layout(self._catalogue, file.data, len(self._header), found, packed)
        if layout is not None:
            self._layouts.keep(self._key, layout)

    def _is_of(self, file: WholeFile) -> bool:
        """Return whether neither header nor size changed while the file was read."""
        same_size = len(file.data) == self._file_bytes
        return same_size and file.data[: len(self._header)] == self._header


def _layout(
    catalogue: LoraCatalogue,
    file: memoryview,
    data: int,
    found: AdapterWeights,
    packed: AdapterWeights,
) -> FileLayout | None:
    sources, blocks = tuple(block_order(found)), tuple(block_order(packed))
    dtypes = {matrix.dtype for matrix in sources}
    if len(dtypes) != 1 or sum(m.nbytes for m in sources) != len(file) - data:
        return None
    begin = _address(np.frombuffer(file, np.uint8))
    if not all(_lies_in(matrix, begin + data, begin + len(file)) for matrix in sources):
        return None
    matrices, start = [], 0
    for source in sources:
        first = _address(source) - begin
        matrices.append(_Matrix(source.dtype, source.shape, first, source.strides, start))
        start += block_room(source)
    numbers = {id(matrix): number for number, matrix in enumerate(blocks)}
    pairs = {key: (numbers[id(s.a)], numbers[id(s.b)]) for key, s in packed.sites.items()}
    return FileLayout(
        catalogue,
        dtypes.pop(),
        data,
        tuple(matrices),
        start,
        tuple((key, pair, packed.sites[key].scaling) for key, pair in pairs.items()),
        tuple(_experts(pairs)),
        packed.report,
        packed.demand,
        packed.site_columns,
        packed.rows_by_width(),
        tuple(_runs(packed)),
    )


def _experts(pairs: dict[tuple[str, int], _Pair]) -> Iterator[_Pair]:
    """Yield B of gate and of up of each layer where both share A, by their numbers."""
    for (name, layer), (a, b) in pairs.items():
        up = pairs.get((UP, layer))
        if name == GATE and up is not None and up[0] == a:
            yield b, up[1]


def _runs(packed: AdapterWeights) -> Iterator[_Run]:
    runs = packed.host_runs
    begin = min(_address(run.rows) for run in runs)
    for run in runs:
        form = run.rows.dtype, run.rows.shape
        yield _Run(run.width, run.numbers, run.counts, *form, _address(run.rows) - begin)


def _lies_in(matrix: np.ndarray, first: int, last: int) -> bool:
    """Return whether all values of a matrix lie between two addresses."""
    low, high = np.lib.array_utils.byte_bounds(matrix)
    return first <= low and high <= last


def _address(values: np.ndarray) -> int:
    return values.__array_interface__["data"][0]
