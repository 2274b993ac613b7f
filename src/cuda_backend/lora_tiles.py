"""Finds the segments with many rows, which csrc/lora_gemm/prefill_*.cuh serve.

Those give a row the bits that the kernel of items (csrc/lora_gemm/items.cuh) gives it, so which of
them serves a segment may follow from the batch. Where a call may have such segments the device
decides.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.typing import Array, Int

FEWEST_ROWS = 256  # of a call in which to look for such segments
SEGMENT_ROWS = 24  # of a segment that becomes tiles; shorter ones do if all fit the GPU at a time
TOTAL_ROWS = 128  # of all these segments, or else there are no tiles
RECORD = 80  # words that say what a tile is
# Before an expand, a shrink of tiles is a launch more, 3 us on an H200 that a batch of many
# adapters has for nothing: only for calls this long, or so long for their slots that segments are
# bound to be.
LONG_CALL, ROWS_OF_SLOT = 2048, 64
# Of these ranks they may come behind the items, see csrc/lora_gemm/prefill_pair.cuh: that costs
# calls this long 2 us where there are none, shorter ones 4 to 5, and one adapter has 8 of 41 us
# back.
ROWS_BEHIND, RANKS_BEHIND = 1024, range(33, 65)
# Up to this rank a shrink alone is by items: 15.4 us for 4096 rows of 4 adapters on an H200, 19.0
# by tiles.
ITEMS_RANK = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Segments with many rows, cut into tiles, and the items of the others."""

    items: Int[Array, "rows 4"]
    num_items: Int[Array, "1"]
    tiles: Int[Array, "tiles words"]  # TileRecord in csrc/lora_gemm/prefill_args.cuh
    cut: Int[Array, "4"]  # as TileArgs says there


def row_tiles(
    items: Int[Array, "rows 4"], num_items: Int[Array, "1"], order: Int[Array, "rows"]
) -> Tiles:
    """Return the tiles of rows of which these are all items.

    There are none where long segments have less than three quarters of the rows with an adapter:
    they would keep the kernel from the others (expand of 1024 rows of rank 16, Zipf over 512, on an
    H200: 54.7 us with its seven longest segments as tiles, 48.1 without).
    """
    rows = len(items)
    most = 2 * (rows // SEGMENT_ROWS) + 1
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in (items.shape, (1,), (most, RECORD), (4,))]
    call = jax.ffi.ffi_call("lora_jax_cuda_row_tiles", shapes)
    limits = {"least_rows": np.int64(SEGMENT_ROWS), "least_total": np.int64(TOTAL_ROWS)}
    return Tiles(*call(items, num_items, order, **limits))


def expects_tiles(rows: int, slots: int) -> bool:
    """Return whether so many rows of so few slots are bound to be in tiles."""
    return rows >= LONG_CALL or rows >= max(FEWEST_ROWS, ROWS_OF_SLOT * slots)


def shrink_pays(rows: int, slots: int, max_rank: int) -> bool:
    """Return whether a call that expands too, of so many rows and slots, should shrink tiles."""
    behind = rows >= ROWS_BEHIND and max_rank in RANKS_BEHIND
    return behind or expects_tiles(rows, slots)
