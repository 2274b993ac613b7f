"""Finds the segments with many rows, which the kernels of csrc/lora_tiles.cuh serve.

Those give a row the bits that the kernel of items (csrc/lora_gemm.cuh) gives it, so which of them
serves a segment may follow from the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.typing import Array, Int

FEWEST_ROWS = 2048  # of a call that looks for such segments: below it they would not pay
SEGMENT_ROWS = 256  # of a segment that becomes tiles: a tile takes its time, full or not
TOTAL_ROWS = 2048  # of all these segments, or else there are no tiles
LEAST_TILE = 32  # rows; only the last tile of a segment has fewer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Segments with many rows, cut into tiles of up to 192 rows."""

    tiles: Int[Array, "tiles 4"]  # slot, expert, first place, number of rows
    cut: Int[Array, "3"]  # how many; blocks of 8 rows in the largest; rows with an adapter at all


def row_tiles(
    items: Int[Array, "rows 4"], num_items: Int[Array, "1"]
) -> tuple[Int[Array, "rows 4"], Int[Array, "1"], Tiles]:
    """Return the items that stay, their number, and tiles in place of the others."""
    most = len(items) // LEAST_TILE + len(items) // SEGMENT_ROWS + 1
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in (items.shape, (1,), (most, 4), (3,))]
    call = jax.ffi.ffi_call("lora_jax_cuda_row_tiles", shapes)
    limits = {"least_rows": np.int64(SEGMENT_ROWS), "least_total": np.int64(TOTAL_ROWS)}
    small, num_small, tiles, cut = call(items, num_items, **limits)
    return small, num_small, Tiles(tiles, cut)


def no_tiles() -> Tiles:
    """Return what stands for tiles where a call has too few rows to look for them."""
    return Tiles(jnp.zeros((0, 4), jnp.int32), jnp.zeros((3,), jnp.int32))
