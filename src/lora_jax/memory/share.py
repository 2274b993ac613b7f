"""A weight tensor's pages, shown read-only to another process over a Unix socket, in one shot.

The message is a header, 8 bytes of length and that much JSON, then one byte per batch of
descriptors (SCM_RIGHTS). Who may connect is the business of whoever opened the socket.
"""

import dataclasses
import itertools
import json
import math
import os
import socket
from collections.abc import Iterator

import numpy as np

from lora_jax.memory.pool import Page, PagePool
from lora_jax.memory.virtual import AbstractVirtualMemory
from lora_jax.memory.weight_tensor import WeightTensor
from lora_jax.typing import Array

_BATCH = 250  # Linux carries at most 253 descriptors in a message
_LONGEST_HEADER = 1 << 24


class ShareError(ConnectionError):
    """The other side went away in the middle, or did not speak as this module does."""


class Lease:
    """References that keep exported pages from being reused while an importer may read them."""

    def __init__(self, pool: PagePool, pages: list[Page]):
        self._pool, self._pages = pool, pages

    def close(self) -> None:
        """Drop the references; a second call does nothing. For when the importer is gone."""
        while self._pages:
            self._pool.release(self._pages.pop())


def export_tensor(connection: socket.socket, tensor: WeightTensor) -> Lease:
    """Send all pages of `tensor` for reading; return what keeps them for the importer.

    The end of the connection says that the importer has gone, killed or not: close the lease then.
    Experts that are mapped later are not shown.

    Raises:
        OSError: the connection broke; nothing is kept.
        NotImplementedError: the memory has no descriptors.
    """
    pages, mapped = tensor.retain_pages()
    lease = Lease(tensor.pool, list(pages.values()))
    header = {
        "shape": tensor.shape,
        "dtype": tensor.dtype.name,
        "page_bytes": tensor.pool.page_bytes,
        "pages": _spans(pages),
        "mapped": _spans(mapped),
    }
    try:
        text = json.dumps(header).encode()
        connection.sendall(len(text).to_bytes(8, "little") + text)
        for batch in itertools.batched(pages.values(), _BATCH):
            _send_pages(connection, tensor.pool.memory, batch)
    except BaseException:
        lease.close()
        raise
    return lease


def _send_pages(
    connection: socket.socket, memory: AbstractVirtualMemory, pages: tuple[Page, ...]
) -> None:
    fds: list[int] = []
    try:
        fds += (memory.export_fd(page.handle) for page in pages)
        socket.send_fds(connection, [b"\0"], fds)
    finally:
        for fd in fds:
            os.close(fd)


@dataclasses.dataclass(frozen=True)
class _Header:
    shape: tuple[int, int, int]
    dtype: np.dtype
    page_bytes: int
    numbers: tuple[int, ...]
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
        self._page_bytes, self._range_bytes = header.page_bytes, header.range_bytes
        self._placed: list[int] = []
        self._array: Array | None = None  # made when first asked for
        self._address: int | None = None
        try:
            self._address = memory.reserve(self._range_bytes)
            for number, handle in zip(header.numbers, handles, strict=True):
                place = self._address + number * self._page_bytes
                memory.map(place, handle, self._page_bytes)
                self._placed.append(place)
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
            self._memory.unmap(self._placed[-1], self._page_bytes)
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
        for batch in itertools.batched(header.numbers, _BATCH):
            handles += _receive_pages(connection, memory, len(batch), header.page_bytes)
    except BaseException:
        for handle in handles:
            memory.destroy_page(handle)
        raise
    return ImportedTensor(memory, header, handles)


def _receive_header(connection: socket.socket) -> _Header:
    length = int.from_bytes(_receive(connection, 8), "little")
    if length > _LONGEST_HEADER:
        raise ShareError(f"a header of {length} bytes is not one of ours")
    try:
        return _parse(json.loads(_receive(connection, length)))
    except (KeyError, TypeError, ValueError) as error:
        raise ShareError(f"the header cannot be read: {error!r}") from error


def _parse(said: dict) -> _Header:
    """Return the header; ValueError for numbers that do not fit each other."""
    experts, d_out, d_in = (int(size) for size in said["shape"])
    dtype, page_bytes = np.dtype(said["dtype"]), int(said["page_bytes"])
    if min(experts, d_out, d_in, page_bytes) < 1:
        raise ValueError(f"shape {said['shape']}, pages of {page_bytes} bytes")
    num_pages = -(-experts * d_out * d_in * dtype.itemsize // page_bytes)
    numbers = tuple(_indices(said["pages"], num_pages))
    mapped = tuple(_indices(said["mapped"], experts))
    return _Header((experts, d_out, d_in), dtype, page_bytes, numbers, mapped)


def _receive_pages(
    connection: socket.socket, memory: AbstractVirtualMemory, count: int, page_bytes: int
) -> list[int]:
    """Return handles of one batch of pages; the descriptors are closed again."""
    data, fds, _, _ = socket.recv_fds(connection, 1, _BATCH, socket.MSG_CMSG_CLOEXEC)
    handles: list[int] = []
    try:
        if len(data) != 1 or len(fds) != count:
            raise ShareError(f"{len(fds)} of {count} pages arrived")
        for fd in fds:
            handles.append(memory.import_fd(fd, page_bytes))
    except BaseException:
        for handle in handles:
            memory.destroy_page(handle)
        raise
    finally:
        for fd in fds:
            os.close(fd)
    return handles


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ShareError(f"the connection ended after {len(data)} of {count} bytes")
        data += part
    return data


def _spans(numbers) -> list[tuple[int, int]]:
    """Return sorted numbers as [start, stop) pairs."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans


def _indices(spans: list, limit: int) -> Iterator[int]:
    """Yield the numbers of [start, stop) pairs, which must rise and stay below `limit`."""
    reached = 0
    for start, stop in spans:
        if not reached <= start < stop <= limit:
            raise ValueError(f"pair {start}, {stop} does not fit 0..{limit}")
        reached = stop
        yield from range(start, stop)
