"""Adds adapters to the rows of segments that have many, by the kernels of csrc/lora_tiles.cuh.

They give a row the bits that the kernels behind `lora_gemm` give it, so which of them serves a
segment may follow from the batch. `lora_gemm` is where to call them from.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.typing import Array, Float, Int

FEWEST_ROWS = 512  # of a call that looks for such segments: below it they would not pay
SEGMENT_ROWS = 64  # of a segment that becomes tiles
TOTAL_ROWS = 512  # of all these segments, or else there are no tiles
LEAST_TILE = 32  # rows; only the last tile of a segment has fewer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Segments with many rows, cut into tiles of up to 128 rows."""

    tiles: Int[Array, "tiles 4"]  # slot, expert, first place, number of rows
    cut: Int[Array, "2"]  # how many there are; blocks of 8 rows in the largest


def row_tiles(
    items: Int[Array, "rows 4"], num_items: Int[Array, "1"]
) -> tuple[Int[Array, "rows 4"], Int[Array, "1"], Tiles]:
    """Return the items that stay, their number, and tiles in place of the others."""
    most = len(items) // LEAST_TILE + len(items) // SEGMENT_ROWS + 1
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in (items.shape, (1,), (most, 4), (2,))]
    call = jax.ffi.ffi_call("lora_jax_cuda_row_tiles", shapes)
    limits = {"least_rows": np.int64(SEGMENT_ROWS), "least_total": np.int64(TOTAL_ROWS)}
    small, num_small, tiles, cut = call(items, num_items, **limits)
    return small, num_small, Tiles(tiles, cut)


def lora_pair(
    y: Float[Array, "rows d_out"],
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    order: Int[Array, "rows"],
    tiles: Tiles,
    max_rank: int,
) -> Float[Array, "rows d_out"]:
    """Return y with the adapters' part added in the rows of the tiles."""
    h = jax.ShapeDtypeStruct((len(y), -(-max_rank // 8) * 8), jnp.bfloat16)
    shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype), h]
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_tiles", shapes, input_output_aliases={0: 0})
    table = (entries, scaling, order, tiles.tiles, tiles.cut)
    return call(y, x, a_pool, b_pool, *table, max_rank=np.int64(max_rank))[0]


def lora_shrink(
    h: Float[Array, "rows h_columns"],
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    order: Int[Array, "rows"],
    tiles: Tiles,
    max_rank: int,
) -> Float[Array, "rows h_columns"]:
    """Return h with the rows of the tiles, which lie in sorted order, filled in."""
    shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_tiles_shrink", shape, input_output_aliases={0: 0})
    table = (entries, scaling, order, tiles.tiles, tiles.cut)
    return call(h, x, a_pool, *table, max_rank=np.int64(max_rank))


def lora_expand(
    y: Float[Array, "rows d_out"],
    h: Float[Array, "rows h_columns"],
    b_pool: Float[Array, "b_rows d_out"],
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    order: Int[Array, "rows"],
    tiles: Tiles,
    max_rank: int,
) -> Float[Array, "rows d_out"]:
    """Return y with h B added in the rows of the tiles."""
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_tiles_expand", shape, input_output_aliases={0: 0})
    table = (entries, scaling, order, tiles.tiles, tiles.cut)
    return call(y, h, b_pool, *table, max_rank=np.int64(max_rank))
