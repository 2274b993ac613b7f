"""Splits sorted rows into items of work: rows of one segment within one tile of rows.

A kernel that walks tiles of rows and the matrices that they ask for needs a list of (tile, segment)
pairs. These are made on the device, with sizes that do not depend on the data and no host sync.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lora_jax.typing import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileList:
    """Items in the order of their rows; entries from `num_items` (`num_segments`) on mean nothing,
    but `segment` is an index everywhere.

    Item i is rows [start[i], end[i]) of one tile and belongs to segment[i]. segment_start is the
    first row of each segment.
    """

    start: Int[Array, "rows"]
    end: Int[Array, "rows"]
    segment: Int[Array, "rows"]
    segment_start: Int[Array, "rows"]
    num_items: Int[Array, ""]
    num_segments: Int[Array, ""]


def row_items(begins_segment: Bool[Array, "rows"], num_rows: Int[Array, ""], tile: int) -> TileList:
    """Return the items of the first num_rows rows, where each segment begins as marked.

    An item begins where a segment or a tile of `tile` rows does. Row 0 begins a segment always.
    """
    rows = begins_segment.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    begins_segment = (begins_segment | (row == 0)) & (row < num_rows)
    begins_item = (begins_segment | (row % tile == 0)) & (row < num_rows)
    start = places(begins_item, num_rows)
    segment_of_row = jnp.cumsum(begins_segment, dtype=jnp.int32) - 1
    return TileList(
        start=start,
        end=jnp.append(start[1:], num_rows),
        segment=jnp.maximum(segment_of_row[jnp.minimum(start, rows - 1)], 0),
        segment_start=places(begins_segment, num_rows),
        num_items=jnp.sum(begins_item, dtype=jnp.int32),
        num_segments=jnp.sum(begins_segment, dtype=jnp.int32),
    )


def places(marked: Bool[Array, "rows"], fill: Int[Array, ""] | int) -> Int[Array, "rows"]:
    """Return the places of what is marked, in order, then `fill`."""
    rows = marked.shape[0]
    rank = jnp.cumsum(marked, dtype=jnp.int32) - 1
    out = jnp.full((rows,), fill, jnp.int32)
    row = jnp.arange(rows, dtype=jnp.int32)
    return out.at[jnp.where(marked, rank, rows)].set(row, mode="drop", unique_indices=True)
