"""Row schedule of the Mosaic LoRA kernels: rows sorted by adapter, cut into items and tiles."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from lora_jax.ops import hopper
from lora_jax.ops.row_items import row_items
from lora_jax.typing import Array, Float, Int

ALIGN = 8  # rows: copied tiles of the pools and of x start at multiples
DEPTH = 2 * hopper.COLUMNS  # of d_in in one stage of the shrink
TALL = 64  # rank rows in one tile of the shrink
STEP = 16  # rank rows in one stage of the expand
CTAS = 2  # per SM
MAX_RANK = 128
MAX_PAIRED = 2048  # rows that are sorted by comparing all pairs


@dataclasses.dataclass(frozen=True)
class LoraGemmConfig:
    """Tiles of both launches, chosen while tracing."""

    rows: int  # of x in one tile
    columns: int = 128  # of d_out in one warpgroup's tile
    warpgroups: int = 2  # of the expand that multiply
    shrink_stages: int = 5
    expand_stages: int = 6
    slots: int = 4  # works of the expand whose y is on its way in or out: two at least


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraGemmSchedule:
    """Rows in the order of their adapters, and the items they are cut into.

    Columns of items: first rank row of A and of B (multiples of 8), low and end of the adapter's
    own rows from there (A's, then B's), first row (a multiple of 8), low and end of the item's own.
    """

    order: Int[Array, "padded"]  # place -> row; the first ones have an adapter
    items: Int[Array, "rows 9"]
    num_items: Int[Array, "1"]
    a_low: Int[Array, "padded"]
    b_low: Int[Array, "padded"]
    rank: Int[Array, "padded"]
    scaling: Float[Array, "padded"]


def find_config(rows: int, slots: int, max_rank: int) -> LoraGemmConfig:
    """Return tiles for so many rows of at most so many adapters, up to MAX_RANK.

    Many rows of few adapters share one read of the weights in a tile of up to 32 rows, at which two
    CTAs of three warpgroups still find registers on an SM: tiles of 48 rows took a sixth longer.
    Every row of a tile costs, its own or not: tiles of 8 are best up to 16 rows in the mean.
    """
    tiles = ((16, 8), (64, 16))
    tile = next((tile for most, tile in tiles if rows <= most * slots), 32)
    return fitted(LoraGemmConfig(tile), max_rank)


def fitted(config: LoraGemmConfig, max_rank: int) -> LoraGemmConfig:
    """Return the config with as many stages and slots as two CTAs per SM have memory for."""
    room = hopper.SHARED_BYTES // CTAS - 2048
    stage = (TALL + config.rows) * DEPTH * 2
    wide = config.columns * config.warpgroups
    slot = config.rows * (wide + rank_steps(max_rank) * STEP) * 2
    return dataclasses.replace(
        config,
        shrink_stages=min(6, (room - config.rows * TALL * 4) // stage),
        slots=min(6, (room - config.expand_stages * STEP * wide * 2) // slot),
    )


def rank_steps(max_rank: int) -> int:
    """Return how many stages the rank rows of any adapter take, wherever they begin."""
    return -(-(max_rank + ALIGN - 1) // STEP)


def sorted_order(slot: Int[Array, "rows"], expert: Int[Array, "rows"]) -> Int[Array, "rows"]:
    """Return the rows by slot, then expert, then place.

    Few rows are ranked by comparing all pairs, in one parallel step: on a GPU a sort of 1024 rows
    is dozens of steps of one CTA.
    """
    rows = slot.shape[0]
    position = jnp.arange(rows, dtype=jnp.int32)
    if rows > MAX_PAIRED:
        return lax.sort((slot, expert, position), num_keys=2)[2]
    slots, experts, places = (v[None, :] for v in (slot, expert, position))
    slot, expert, row = (v[:, None] for v in (slot, expert, position))
    earlier = (experts < expert) | ((experts == expert) & (places < row))
    rank = jnp.sum((slots < slot) | ((slots == slot) & earlier), axis=1, dtype=jnp.int32)
    return jnp.zeros_like(position).at[rank].set(position, unique_indices=True)


def make_schedule(
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"],
    tile: int,
) -> LoraGemmSchedule:
    """Return rows sorted by (slot, expert), those without adapter last, and their items."""
    rows, slots = row_to_slot.shape[0], entries.shape[0]
    valid = (row_to_slot >= 0) & (row_to_slot < slots)
    has = valid & (entries[jnp.where(valid, row_to_slot, 0), 2] > 0)
    slot = jnp.where(has, row_to_slot, jnp.int32(slots))
    order = sorted_order(slot, row_to_expert)
    slot, expert = slot[order], row_to_expert[order]
    changed = (slot[1:] != slot[:-1]) | (expert[1:] != expert[:-1])
    tile_list = row_items(jnp.pad(changed, (1, 0)), jnp.sum(has, dtype=jnp.int32), tile)
    entry = entries[jnp.minimum(slot, slots - 1)]
    a_row = entry[:, 0] + expert * entry[:, 3]
    b_row = entry[:, 1] + expert * entry[:, 4]
    rank = jnp.where(slot < slots, entry[:, 2], 0)
    a_low, b_low = a_row % ALIGN, b_row % ALIGN
    of_row = (a_row - a_low, b_row - b_low, a_low, a_low + rank, b_low, b_low + rank)
    first = jnp.minimum(tile_list.start, rows - 1)
    base = first // tile * tile
    of_item = (base, first - base, jnp.minimum(tile_list.end, rows) - base)
    items = jnp.stack([c[first] for c in of_row] + list(of_item), axis=1)
    pad = (0, -rows % ALIGN)
    padded = (jnp.pad(v, pad) for v in (order, a_low, b_low, rank))
    order, a_low, b_low, rank = padded
    scale = jnp.pad(scaling[jnp.minimum(slot, slots - 1)], pad)
    return LoraGemmSchedule(order, items, tile_list.num_items.reshape(1), a_low, b_low, rank, scale)
