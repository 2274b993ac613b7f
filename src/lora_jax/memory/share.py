"""A weight tensor's pages, shown read-only to another process over a Unix socket, in one shot.

`wire` says how the message looks.
"""

import dataclasses
import itertools
import math
import socket
from collections.abc import Iterator

import numpy as np

from lora_jax.memory.pool import Block, PagePool
from lora_jax.memory.virtual import AbstractVirtualMemory
from lora_jax.memory.weight_tensor import WeightTensor
from lora_jax.memory.wire import (
    BATCH,
    ShareError,
    close_all,
    receive_fds,
    receive_header,
    send_fds,
    send_header,
)
from lora_jax.typing import Array


class Lease:
    """References that keep exported pages from being reused while an importer may read them."""

    def __init__(self, pool: PagePool, blocks: list[Block]):
        self._pool, self._blocks = pool, blocks

    def close(self) -> None:
        """Drop the references; a second call does nothing. For when the importer is gone."""
        while self._blocks:
            self._pool.release(self._blocks.pop())


def export_tensor(connection: socket.socket, tensor: WeightTensor) -> Lease:
    """Send all pages of `tensor` for reading; return what keeps them for the importer.

    The end of the connection says that the importer has gone, killed or not: close the lease then.
    Experts that are mapped later are not shown.

    Raises:
        OSError: the connection broke; nothing is kept.
        NotImplementedError: the memory has no descriptors.
    """
    blocks, mapped = tensor.retain_pages()
    lease = Lease(tensor.pool, list(blocks.values()))
    header = {
        "shape": tensor.shape,
        "dtype": tensor.dtype.name,
        "page_bytes": tensor.pool.page_bytes,
        "pages": [(start, start + block.num_pages) for start, block in blocks.items()],
        "mapped": _spans(mapped),
    }
    try:
        send_header(connection, header)
        for batch in itertools.batched(blocks.values(), BATCH):
            _send_blocks(connection, tensor.pool.memory, batch)
    except BaseException:
        lease.close()
        raise
    return lease


def _send_blocks(
    connection: socket.socket, memory: AbstractVirtualMemory, blocks: tuple[Block, ...]
) -> None:
    fds: list[int] = []
    try:
        fds += (memory.export_fd(block.handle) for block in blocks)
        send_fds(connection, fds)
    finally:
        close_all(fds)


@dataclasses.dataclass(frozen=True)
class _Header:
    shape: tuple[int, int, int]
    dtype: np.dtype
    page_bytes: int
    blocks: tuple[range, ...]  # of pages, by their numbers within the range
    mapped: tuple[int, ...]

    @property
    def range_bytes(self) -> int:
        whole = math.prod(self.shape) * self.dtype.itemsize
        return -(-whole // self.page_bytes) * self.page_bytes


class ImportedTensor:
    """Another process's weight tensor, read-only: `array` shows what it had mapped when sent."""

    def __init__(self, memory: AbstractVirtualMemory, header: _Header, handles: list[int]):
        """Map the pages, which it owns from now on, also where this fails."""
        self.shape, self.dtype, self.mapped = header.shape, header.dtype, header.mapped
        self._memory, self._handles = memory, list(handles)
        self._range_bytes = header.range_bytes
        self._placed: list[tuple[int, int]] = []  # address and bytes
        self._array: Array | None = None  # made when first asked for
        self._address: int | None = None
        try:
            self._address = memory.reserve(self._range_bytes)
            for block, handle in zip(header.blocks, handles, strict=True):
                address = self._address + block.start * header.page_bytes
                memory.map(address, handle, len(block) * header.page_bytes)
                self._placed.append((address, len(block) * header.page_bytes))
        except BaseException:
            self.close()
            raise

    @property
    def array(self) -> Array:
        """Return the [experts_total, d_out, d_in] array; only `mapped` experts may be read."""
        array = self._array
        if array is None:
            array = self._memory.array(self.address, self.shape, self.dtype)
            self._array = array
        return array

    @property
    def address(self) -> int:
        """Return where the array begins."""
        if self._address is None:
            raise ValueError("the imported tensor is closed")
        return self._address

    def close(self) -> None:
        """Unmap and forget everything; a second call does nothing."""
        if self._array is not None:
            self._array.delete()
            self._array = None
        while self._placed:
            self._memory.unmap(*self._placed[-1])
            self._placed.pop()
        while self._handles:
            self._memory.destroy_page(self._handles.pop())
        if self._address is not None:
            self._memory.release(self._address, self._range_bytes)
            self._address = None


def import_tensor(connection: socket.socket, memory: AbstractVirtualMemory) -> ImportedTensor:
    """Return the tensor that the other side exports, mapped read-only.

    Keep the connection open as long as the tensor: its end tells the exporter to take the pages.

    Raises:
        ShareError: the other side went away, or sent something else; nothing is kept.
    """
    header = _receive_header(connection)
    handles: list[int] = []
    try:
        for batch in itertools.batched(header.blocks, BATCH):
            sizes = [len(block) * header.page_bytes for block in batch]
            handles += _receive_blocks(connection, memory, sizes)
    except BaseException:
        for handle in handles:
            memory.destroy_page(handle)
        raise
    return ImportedTensor(memory, header, handles)


def _receive_header(connection: socket.socket) -> _Header:
    fields = receive_header(connection)
    try:
        return _parse(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ShareError(f"the header cannot be read: {error!r}") from error


def _parse(fields: dict) -> _Header:
    """Return the header; ValueError for numbers that do not fit each other."""
    experts, d_out, d_in = (int(size) for size in fields["shape"])
    dtype, page_bytes = np.dtype(fields["dtype"]), int(fields["page_bytes"])
    if min(experts, d_out, d_in, page_bytes) < 1:
        raise ValueError(f"shape {fields['shape']}, pages of {page_bytes} bytes")
    num_pages = -(-experts * d_out * d_in * dtype.itemsize // page_bytes)
    blocks = tuple(_ranges(fields["pages"], num_pages))
    mapped = tuple(itertools.chain.from_iterable(_ranges(fields["mapped"], experts)))
    return _Header((experts, d_out, d_in), dtype, page_bytes, blocks, mapped)


def _receive_blocks(
    connection: socket.socket, memory: AbstractVirtualMemory, sizes: list[int]
) -> list[int]:
    """Return handles of one batch of blocks of so many bytes; the descriptors are closed again."""
    fds = receive_fds(connection, len(sizes))
    handles: list[int] = []
    try:
        for fd, num_bytes in zip(fds, sizes, strict=True):
            handles.append(memory.import_fd(fd, num_bytes))
    except BaseException:
        for handle in handles:
            memory.destroy_page(handle)
        raise
    finally:
        close_all(fds)
    return handles


def _spans(numbers) -> list[tuple[int, int]]:
    """Return sorted numbers as [start, stop) pairs."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans


def _ranges(spans: list, limit: int) -> Iterator[range]:
    """Yield the [start, stop) pairs, which must rise and stay below `limit`."""
    reached = 0
    for start, stop in spans:
        if not reached <= start < stop <= limit:
            raise ValueError(f"pair {start}, {stop} does not fit 0..{limit}")
        reached = stop
        yield range(start, stop)
