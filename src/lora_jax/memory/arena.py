"""All arrays of a model behind one another in few pages, shown read-only to other processes.

The owner writes each array once and publishes: a manifest with names, shapes, dtypes, offsets and
SHA-256 of every array, and a descriptor per block of pages. An importer maps the blocks for reading
and takes its arrays there, without a copy. Whoever holds the descriptors keeps the memory, also
when the owner has gone.
"""

import dataclasses
import hashlib
import json
import math
from typing import Any

import numpy as np

from lora_jax.memory.virtual import AbstractVirtualMemory, MappingError
from lora_jax.memory.wire import ShareError
from lora_jax.typing import Array

ALIGNMENT = 256  # of an array's first byte: what a GPU asks for
_LAYOUT = 1  # version of the manifest
_BLOCKS = 256  # of an arena, so that the last one wastes little
_LARGEST_BLOCK = 256 << 20


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Place and content of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    sha256: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of an arena: its arrays by name, and the bytes of its blocks in order."""

    leaves: dict[str, Leaf]
    blocks: tuple[int, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all that the manifest says, so of every array."""
        return hashlib.sha256(json.dumps(self.fields(), sort_keys=True).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(self.blocks)

    def fields(self) -> dict[str, Any]:
        """Return what is sent."""
        leaves = {
            name: [list(leaf.shape), leaf.dtype.name, leaf.offset, leaf.sha256]
            for name, leaf in self.leaves.items()
        }
        return {"layout": _LAYOUT, "blocks": list(self.blocks), "leaves": leaves}


def parse_manifest(fields: dict[str, Any]) -> Manifest:
    """Return what `Manifest.fields` gave; ShareError for numbers that do not fit each other."""
    try:
        if fields["layout"] != _LAYOUT:
            raise ValueError(f"layout {fields['layout']}, this is layout {_LAYOUT}")
        blocks = tuple(int(size) for size in fields["blocks"])
        if not blocks or min(blocks) < 1:
            raise ValueError(f"blocks of {blocks} bytes")
        leaves = {name: _leaf(*of) for name, of in fields["leaves"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ShareError(f"the manifest cannot be read: {error!r}") from error
    reached = 0
    for name, leaf in sorted(leaves.items(), key=lambda item: item[1].offset):
        if leaf.offset < reached or leaf.offset % ALIGNMENT or leaf.num_bytes < 1:
            raise ShareError(f"the manifest cannot be read: {name} does not fit at {leaf.offset}")
        reached = leaf.offset + leaf.num_bytes
    if reached > sum(blocks):
        raise ShareError(f"the manifest cannot be read: {reached} bytes in {sum(blocks)}")
    return Manifest(leaves, blocks)


def _leaf(shape: list[int], dtype: str, offset: int, sha256: str) -> Leaf:
    if min((int(size) for size in shape), default=1) < 1:
        raise ValueError(f"shape {shape}")
    return Leaf(tuple(int(size) for size in shape), np.dtype(dtype), int(offset), str(sha256))


class Arena:
    """Arrays that are written once, in the order in which they are added."""

    def __init__(self, memory: AbstractVirtualMemory, most_bytes: int):
        """Reserve addresses for `most_bytes`; pages are taken as arrays are added."""
        self._memory, step = memory, memory.granularity
        self._range_bytes = -(-most_bytes // step) * step
        self._block_bytes = min(-(-self._range_bytes // _BLOCKS // step) * step, _LARGEST_BLOCK)
        self._address = memory.reserve(self._range_bytes)
        self._handles: list[int] = []
        self._blocks: list[int] = []
        self._leaves: dict[str, Leaf] = {}
        self._end = 0

    @property
    def manifest(self) -> Manifest:
        """The contents so far."""
        return Manifest(dict(self._leaves), tuple(self._blocks))

    def add(self, name: str, values: np.ndarray) -> Array:
        """Write an array behind the others and return it as a jax.Array, for reading.

        Raises ValueError for a name that stands twice, MappingError where the reserved range ends,
        and OutOfPages.
        """
        if name in self._leaves:
            raise ValueError(f"array {name!r} is in the arena already")
        values = np.ascontiguousarray(values)
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._take(offset + values.nbytes)
        self._memory.write(self._address + offset, values)
        digest = hashlib.sha256(values.reshape(-1).view(np.uint8)).hexdigest()
        self._leaves[name] = Leaf(values.shape, values.dtype, offset, digest)
        self._end = offset + values.nbytes
        return self._memory.array(self._address + offset, values.shape, values.dtype)

    def export(self) -> list[int]:
        """Return a descriptor per block, the caller's to close; nothing is added after this."""
        fds: list[int] = []
        for handle in self._handles:
            fds.append(self._memory.export_fd(handle))
        return fds

    def close(self) -> None:
        """Give the pages back; arrays of the arena must be gone."""
        if self._handles:
            self._memory.unmap(self._address, sum(self._blocks))
        while self._handles:
            self._memory.destroy_page(self._handles.pop())
        self._memory.release(self._address, self._range_bytes)

    def _take(self, end: int) -> None:
        """Map blocks until `end` bytes are there."""
        mapped = sum(self._blocks)
        if end > self._range_bytes:
            raise MappingError(f"arena of {self._range_bytes} bytes cannot hold {end}")
        while mapped < end:
            size = min(self._block_bytes, self._range_bytes - mapped)
            handle = self._memory.create_page(size)
            self._handles.append(handle)
            self._memory.map(self._address + mapped, handle, size)
            self._blocks.append(size)
            mapped += size


class ImportedArena:
    """Another process's arena, mapped for reading."""

    def __init__(self, memory: AbstractVirtualMemory, manifest: Manifest, fds: list[int]):
        """Map the blocks behind `fds`, which stay the caller's to close.

        Raises ShareError where their number is not the manifest's, and MappingError.
        """
        if len(fds) != len(manifest.blocks):
            raise ShareError(f"{len(fds)} descriptors for {len(manifest.blocks)} blocks")
        self.manifest, self._memory = manifest, memory
        self._address = memory.reserve(manifest.num_bytes)
        self._handles: list[int] = []
        self._mapped = 0
        try:
            for fd, size in zip(fds, manifest.blocks, strict=True):
                self._handles.append(memory.import_fd(fd, size))
                memory.map(self._address + self._mapped, self._handles[-1], size)
                self._mapped += size
        except BaseException:
            self.close()
            raise

    @property
    def span(self) -> range:
        """Addresses of the arena in this process."""
        return range(self._address, self._address + self.manifest.num_bytes)

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return an array in place. Raises ValueError where the arena has none such."""
        leaf = self.manifest.leaves.get(name)
        if leaf is None or (leaf.shape, leaf.dtype) != (tuple(shape), np.dtype(dtype)):
            stored = "is not there" if leaf is None else f"is {leaf.dtype.name} {list(leaf.shape)}"
            raise ValueError(
                f"array {name!r}, {np.dtype(dtype).name} {list(shape)} by the model, {stored} in "
                "the backbone: start both from the same folder and dtype."
            )
        return self._memory.array(self._address + leaf.offset, leaf.shape, leaf.dtype)

    def changed(self) -> list[str]:
        """Return the names of arrays whose bytes are not those of the manifest; reads them all."""
        return [
            name
            for name, leaf in self.manifest.leaves.items()
            if hashlib.sha256(
                self._memory.read(self._address + leaf.offset, leaf.num_bytes)
            ).hexdigest()
            != leaf.sha256
        ]

    def close(self) -> None:
        """Unmap; arrays of the arena must be gone."""
        if self._mapped:
            self._memory.unmap(self._address, self._mapped)
        while self._handles:
            self._memory.destroy_page(self._handles.pop())
        self._memory.release(self._address, self.manifest.num_bytes)
        self._mapped = 0
