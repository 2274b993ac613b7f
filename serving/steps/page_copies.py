"""KV pages: those on the device, and copies to and from host memory in the order of a plan.

On the device a page lies in as many places as the model has layers; one program gathers them into a
block, which is one copy to the host. No step waits for a copy out: it is read when it has arrived,
or when its slot is needed. Programs have a fixed number of pages, so that no step compiles any.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.row_copies import has_ended
from lora_jax.kv_cache import (
    Blocks,
    KVShape,
    PagedKVCache,
    blocks_sharding,
    init_cache,
    read_blocks,
    write_blocks,
)
from lora_jax.ops.kv_rows import stored_dim
from lora_jax.sharding import Split
from lora_jax.typing import Array, Int
from serving.api.request import PageMove
from serving.runtime import xla_memory
from serving.steps.step import StepSizes

_PAGES = (2, 16)  # of one program
_MOST_PENDING = 4  # gathered blocks whose bytes the host does not have yet


def own_pages(
    shape: KVShape,
    sizes: StepSizes,
    dtype: jnp.dtype,
    split: Split | None,
    place: Callable[[PagedKVCache], PagedKVCache],
) -> PagedKVCache:
    """Return pages that are donated to each step."""
    make = functools.partial(init_cache, shape, sizes.num_pages, sizes.page_size, dtype, split)
    if split is not None:
        return make()
    leaves = jax.eval_shape(lambda: jax.tree.leaves(make()))
    with xla_memory.large_arrays(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)):
        return place(make())


class PageCopies:
    """Slots of host memory for pages; one thread uses it."""

    def __init__(
        self,
        shape: KVShape,
        sizes: StepSizes,
        dtype: jnp.dtype,
        device: jax.sharding.Sharding,
        split: Split | None = None,
    ):
        """`shape` is that of all heads. Memory of a slot is taken when it is first written."""
        lead = (sizes.num_host_pages, shape.num_layers, sizes.page_size, shape.num_kv_heads)
        self._k = np.empty((*lead, stored_dim(shape.k_dim, dtype)), dtype)
        self._v = np.empty((*lead, stored_dim(shape.v_dim, dtype)), dtype)
        self._nowhere = sizes.num_pages
        self._place = functools.partial(
            jax.device_put, device=blocks_sharding(shape, split) or device
        )
        self._pending: collections.deque[tuple[Blocks, list[int]]] = collections.deque()

    def warm_up(self, cache: PagedKVCache) -> PagedKVCache:
        """Compile every program; the cache is donated, and comes back as it was."""
        for size in _PAGES:
            nowhere = np.full(size, self._nowhere, np.int32)
            blocks = _read(cache, np.zeros(size, np.int32))
            zeros = [np.zeros(part.shape, part.dtype) for part in blocks]
            cache = _write(cache, nowhere, Blocks(*(self._place(part) for part in zeros)))
        return cache

    def run(self, cache: PagedKVCache, moves: Sequence[PageMove]) -> PagedKVCache:
        """Return the cache, which is donated, after these moves."""
        self._land()
        for out, run in itertools.groupby(moves, key=lambda move: move.out):
            for part in itertools.batched(run, _PAGES[-1]):
                if out:
                    self._take_out(cache, part)
                else:
                    cache = self._bring_in(cache, part)
        return cache

    def _take_out(self, cache: PagedKVCache, moves: Sequence[PageMove]) -> None:
        while len(self._pending) >= _MOST_PENDING:
            self._land_first()
        blocks = _read(cache, _padded([move.page for move in moves], 0))
        for part in blocks:
            part.copy_to_host_async()
        self._pending.append((blocks, [move.slot for move in moves]))

    def _bring_in(self, cache: PagedKVCache, moves: Sequence[PageMove]) -> PagedKVCache:
        slots = [move.slot for move in moves]
        while any(not set(slots).isdisjoint(waiting) for _, waiting in self._pending):
            self._land_first()
        pages = _padded([move.page for move in moves], self._nowhere)
        rows = _padded(slots, slots[0])
        blocks = Blocks(*(self._place(part[rows]) for part in (self._k, self._v)))
        return _write(cache, pages, blocks)

    def _land(self) -> None:
        """Write what has arrived to its slots."""
        while self._pending and all(has_ended(part) for part in self._pending[0][0]):
            self._land_first()

    def _land_first(self) -> None:
        blocks, slots = self._pending.popleft()
        self._k[slots] = np.asarray(blocks.k)[: len(slots)]
        self._v[slots] = np.asarray(blocks.v)[: len(slots)]


def _padded(numbers: list[int], filler: int) -> Int[np.ndarray, "pages"]:
    """Return numbers for the smallest program that has room for them."""
    size = next(size for size in _PAGES if size >= len(numbers))
    return np.array(numbers + [filler] * (size - len(numbers)), np.int32)


@jax.jit
def _read(cache: PagedKVCache, numbers: Int[Array, "pages"]) -> Blocks:
    return read_blocks(cache, numbers)


@functools.partial(jax.jit, donate_argnums=0)
def _write(cache: PagedKVCache, numbers: Int[Array, "pages"], blocks: Blocks) -> PagedKVCache:
    return write_blocks(cache, numbers, blocks)
