"""Paged KV cache: a pytree of pages per layer and the pure functions on it.

The caller donates the cache to the step and takes the returned one. Which page belongs to whom
is host business (serving.scheduling.pages.prefix_cache).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lora_jax.ops.kv_rows import stored_dim
from lora_jax.sharding import Split
from lora_jax.typing import Array, Int, Num


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """K and V pages of one layer. MLA keeps one latent per token in `k` and an empty `v`.

    Pages of uint8 hold rows in 8 bits, which have a scale each (ops.kv_rows). With `in_place` they
    are not the step's own: it writes them where they lie (lora_jax.pooled).
    """

    k: Num[Array, "pages page_size kv_heads k_items"]
    v: Num[Array, "pages page_size kv_heads v_items"]
    in_place: bool = dataclasses.field(default=False, metadata={"static": True})


PagedKVCache = tuple[LayerCache, ...]


@dataclasses.dataclass(frozen=True)
class KVShape:
    """Shape of the cache per token and layer; `v_dim` 0 means V is a prefix of K (MLA)."""

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int

    def bytes_per_token(self, dtype: jnp.dtype) -> int:
        """Return the bytes of one token in pages of `dtype`: keys and values of all layers."""
        items = stored_dim(self.k_dim, dtype) + stored_dim(self.v_dim, dtype)
        per_layer = self.num_kv_heads * items
        return self.num_layers * per_layer * jnp.dtype(dtype).itemsize

    def splits_heads(self) -> bool:
        """Return whether the devices of a split share the heads; a latent lies whole on each."""
        return self.v_dim > 0

    def local(self, devices: int) -> "KVShape":
        """Return the shape of what one of so many devices keeps."""
        if not self.splits_heads():
            return self
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads // devices)


def pages_sharding(shape: KVShape, split: Split | None) -> NamedSharding | None:
    """Return where pages of this shape lie; None: on one device."""
    if split is None:
        return None
    return split.heads if shape.splits_heads() else split.whole


def init_cache(
    shape: KVShape,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    split: Split | None = None,
) -> PagedKVCache:
    """Return zeroed pages for every layer, each device of a split having its heads'."""
    where = pages_sharding(shape, split)

    def layer() -> LayerCache:
        lead = (num_pages, page_size, shape.num_kv_heads)
        return LayerCache(
            k=jnp.zeros((*lead, stored_dim(shape.k_dim, dtype)), dtype, device=where),
            v=jnp.zeros((*lead, stored_dim(shape.v_dim, dtype)), dtype, device=where),
        )

    return tuple(layer() for _ in range(shape.num_layers))


class Blocks(NamedTuple):
    """Some pages of all layers, the bytes of each side by side: their form outside the cache."""

    k: Num[Array, "pages layers page_size kv_heads k_items"]
    v: Num[Array, "pages layers page_size kv_heads v_items"]


def blocks_sharding(shape: KVShape, split: Split | None) -> NamedSharding | None:
    """Return where blocks of this shape lie; None: on one device."""
    pages = pages_sharding(shape, split)
    if pages is None:
        return None
    return NamedSharding(pages.mesh, PartitionSpec(None, *pages.spec))


def read_blocks(cache: PagedKVCache, numbers: Int[Array, "pages"]) -> Blocks:
    """Return the pages of these numbers."""
    k = jnp.stack([layer.k[numbers] for layer in cache], axis=1)
    return Blocks(k, jnp.stack([layer.v[numbers] for layer in cache], axis=1))


def write_blocks(cache: PagedKVCache, numbers: Int[Array, "pages"], blocks: Blocks) -> PagedKVCache:
    """Return the cache with these pages in it; numbers out of range are dropped."""

    def written(pages: Array, new: Array) -> Array:
        return pages.at[numbers].set(new, mode="drop")

    return tuple(
        LayerCache(written(layer.k, blocks.k[:, i]), written(layer.v, blocks.v[:, i]))
        for i, layer in enumerate(cache)
    )
