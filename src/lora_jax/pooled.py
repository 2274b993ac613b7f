"""KV pages and rank rows in arrays of constant addresses, with pages of one pool under a part.

Every array spans all that could ever be; memory is only where something lies. A program reads and
writes the part that has memory, and owns none of it: arrays over virtual memory are not donated.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.kv_cache import KVShape, LayerCache, PagedKVCache
from lora_jax.memory.pool import PagePool
from lora_jax.memory.weight_tensor import WeightTensor
from lora_jax.ops.kv_rows import stored_dim
from lora_jax.rank_rows import stored_width

Rows = tuple[int, int, int]  # width, first row, number of rows


class PooledPages:
    """KV pages, each of all layers in one piece: block-major. One thread maps and unmaps.

    Page p of layer l is page p * stride of that layer's array, which begins l pages further on. So
    all layers share block tables, in which page numbers are multiples of the stride.
    """

    def __init__(
        self,
        pool: PagePool,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        dtype: np.dtype,
        *,
        cleared: bool = False,
    ):
        """Reserve addresses for so many pages; none has memory.

        With `cleared` pages that come are zeros when the memory's `finish_clears` returns: kernels
        of a device multiply what lies behind a sequence's end by zero, and a NaN of another array
        would stay one.

        Raises:
            ValueError: a layer's part of a page begins where no array of jax may.
        """
        self.pool, self.stride, self.num_pages = pool, shape.num_layers, num_pages
        self._cleared = cleared
        self._tensors: list[WeightTensor] = []
        self._arrays: list[jax.Array] = []
        lead = (page_size, shape.num_kv_heads)
        sides = [self._side(dim, lead, dtype) for dim in (shape.k_dim, shape.v_dim)]
        layers = zip(*sides, strict=True)
        self.cache: PagedKVCache = tuple(LayerCache(k, v, in_place=True) for k, v in layers)

    def map(self, pages: range) -> None:
        """Give pages memory: all of them, or OutOfPages and none."""
        _map_all([(tensor, pages) for tensor in self._tensors])

    def unmap(self, pages: range) -> None:
        """Take the memory of pages that no step in flight reads."""
        for tensor in self._tensors:
            tensor.unmap(pages)

    def close(self) -> None:
        """Give memory and addresses back; nothing may run any more."""
        _close(self._tensors, self._arrays)

    def check_integrity(self, pages: Iterable[int]) -> None:
        """Raise AssertionError unless these pages, and no others, have memory."""
        wanted = tuple(sorted(pages))
        for tensor in self._tensors:
            tensor.check_integrity()
            assert tensor.mapped == wanted, "KV pages and their memory disagree"

    def _side(self, dim: int, lead: tuple[int, int], dtype: np.dtype) -> list[jax.Array]:
        """Return K or V of each layer."""
        items = stored_dim(dim, dtype)
        shape = ((self.num_pages - 1) * self.stride + 1, *lead, items)
        if not items:
            return [jnp.zeros(shape, dtype)] * self.stride
        of_page = self.stride * lead[0] * lead[1], items
        tensor = WeightTensor(self.pool, (self.num_pages, *of_page), dtype, cleared=self._cleared)
        self._tensors.append(tensor)
        layer_bytes = tensor.expert_bytes // self.stride
        addresses = [tensor.address + n * layer_bytes for n in range(self.stride)]
        arrays = [self.pool.memory.array(address, shape, tensor.dtype) for address in addresses]
        self._arrays += arrays
        return arrays


class PooledRows:
    """Rank rows of every width. One thread maps, writes and unmaps."""

    def __init__(self, pool: PagePool, rows: dict[int, int], dtype: np.dtype, *, overrun: int = 0):
        """Reserve addresses for so many rows of each width.

        Kernels of a device read rows in groups: up to `overrun` rows behind an adapter's, which
        they multiply by zero, and the first rows for an adapter that has none. Where there is an
        overrun these rows have memory, and memory that comes is zeros when the memory's
        `finish_clears` returns. Else nothing has memory.

        Raises OutOfPages where the pool has no room for the first rows.
        """
        self.pool, self.dtype, self.overrun = pool, np.dtype(dtype), overrun
        options = {"overrun": overrun, "cleared": overrun > 0}
        self._tensors: dict[int, WeightTensor] = {}
        for width, count in sorted(rows.items()):
            shape = count, 1, stored_width(width, self.dtype)
            self._tensors[width] = WeightTensor(pool, shape, self.dtype, **options)
            if overrun:
                self._tensors[width].keep(range(min(count, overrun)))
        pool.memory.finish_clears()
        self.arrays: dict[str, jax.Array] = {
            str(width): pool.memory.array(t.address, (t.shape[0], t.shape[2]), self.dtype)
            for width, t in self._tensors.items()
        }

    def num_missing(self, rows: Sequence[Rows]) -> int:
        """Return how many pages of the pool `map` would take."""
        return sum(self._tensors[width].num_missing(run) for width, run in _runs(rows))

    def most_pages(self, rows: dict[int, int]) -> int:
        """Return the most pages that so many rows of each width take, wherever they lie."""
        size = self.pool.page_bytes
        sizes = (
            (count + self.overrun) * self._tensors[width].expert_bytes
            for width, count in rows.items()
            if count
        )
        return sum(-(-num_bytes // size) + 1 for num_bytes in sizes)

    def map(self, rows: Sequence[Rows]) -> None:
        """Give rows memory: all of them, or OutOfPages and none."""
        _map_all([(self._tensors[width], run) for width, run in _runs(rows)])

    def unmap(self, rows: Sequence[Rows]) -> None:
        """Take the memory of rows that no step in flight reads; pages that others lie on stay."""
        for width, run in _runs(rows):
            self._tensors[width].unmap(run)

    def begin_write(self, width: int, start: int, values: np.ndarray) -> None:
        """Write rows [n, items] that have memory, at the latest when `finish_writes` returns."""
        self._tensors[width].begin_write(start, values.astype(self.dtype, copy=False)[:, None])

    @property
    def writes_done(self) -> bool:
        """True if `finish_writes` returns at once."""
        return self.pool.memory.writes_done()

    def finish_writes(self) -> None:
        """Return when all that was begun is there; raises what failed."""
        self.pool.memory.finish_writes()

    def close(self) -> None:
        """Give memory and addresses back, when writes under way have ended; nothing else may run.

        What a write fails with has no reader any more.
        """
        with contextlib.suppress(MemoryError, ValueError, OSError, RuntimeError):
            self.finish_writes()
        _close(self._tensors.values(), list(self.arrays.values()))
        self.arrays = {}

    def check_integrity(self, rows: Iterable[Rows]) -> None:
        """Raise AssertionError unless these rows, and no others, have memory."""
        wanted: dict[int, list[int]] = {width: [] for width in self._tensors}
        for width, run in _runs(list(rows)):
            wanted[width] += run
        for width, tensor in self._tensors.items():
            tensor.check_integrity()
            assert tensor.mapped == tuple(wanted[width]), f"rows of width {width} and their memory"


def _runs(rows: Sequence[Rows]) -> Iterator[tuple[int, range]]:
    """Yield the rows by width, those that follow each other as one."""
    for width, of_width in itertools.groupby(sorted(rows), key=lambda one: one[0]):
        begun: range | None = None
        for _, start, count in of_width:
            if begun is not None and begun.stop == start:
                begun = range(begun.start, start + count)
                continue
            if begun is not None:
                yield width, begun
            begun = range(start, start + count)
        if begun is not None:
            yield width, begun


def _map_all(wanted: Sequence[tuple[WeightTensor, range]]) -> None:
    """Map all of it, or none."""
    done: list[tuple[WeightTensor, range]] = []
    try:
        for tensor, run in wanted:
            tensor.map(run)
            done.append((tensor, run))
    except BaseException:
        for tensor, run in done:
            tensor.unmap(run)
        raise


def _close(tensors: Iterable[WeightTensor], arrays: Sequence[jax.Array]) -> None:
    for array in arrays:
        if not array.is_deleted():
            array.delete()
    for tensor in tensors:
        tensor.close()
