"""Adds adapters to rows: a loop over (slot, expert, 8 rows), portable JAX."""

import jax
import jax.numpy as jnp

from lora_jax.ops.lora_gemm.batch import LoraBatch, float_rows
from lora_jax.typing import Array, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST
BLOCK = 8


def lora_gemm(
    y: Float[Array, "rows d_out"],
    batch: LoraBatch,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference; rows without an adapter cost nothing."""
    x, a_pool, b_pool = batch.x, batch.a_pool, batch.b_pool
    entries, scaling, max_rank = batch.entries, batch.scaling, batch.max_rank
    row_to_slot, row_to_expert = batch.row_to_slot, batch.row_to_expert
    rows = y.shape[0]
    f32 = jnp.float32
    order, starts, counts, num_blocks = _blocks(entries, row_to_slot, row_to_expert)
    order = jnp.pad(order, (0, BLOCK))
    lane = jnp.arange(BLOCK, dtype=jnp.int32)
    rank_row = jnp.arange(max_rank, dtype=jnp.int32)

    def one_block(i, y):
        chosen = jax.lax.dynamic_slice_in_dim(order, starts[i], BLOCK)
        slot, expert = row_to_slot[chosen[0]], row_to_expert[chosen[0]]
        a_off, b_off, rank, a_stride, b_stride = (entries[slot, c] for c in range(5))
        live = (rank_row < rank)[:, None]
        a = float_rows(a_pool.at[a_off + expert * a_stride + rank_row].get(mode="clip"))
        b = float_rows(b_pool.at[b_off + expert * b_stride + rank_row].get(mode="clip"))
        a, b = jnp.where(live, a, f32(0)), jnp.where(live, b, f32(0))
        h = jnp.einsum("ti,ri->tr", x[chosen].astype(f32), a, precision=HIGHEST) * scaling[slot]
        z = y[chosen].astype(f32) + jnp.einsum("tr,ro->to", h, b, precision=HIGHEST)
        target = jnp.where(lane < counts[i], chosen, rows)
        return y.at[target].set(z.astype(y.dtype), mode="drop")

    return jax.lax.fori_loop(0, num_blocks, one_block, y)


def _blocks(
    entries: Int[Array, "slots 5"],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"],
) -> tuple[Int[Array, "rows"], Int[Array, "rows"], Int[Array, "rows"], Int[Array, ""]]:
    """Return rows sorted by (slot, expert), and blocks of up to 8 equal ones among them.

    Blocks are (starts, counts, how many); only rows that have an adapter are in a block.
    """
    rows = row_to_slot.shape[0]
    position = jnp.arange(rows, dtype=jnp.int32)
    has = (row_to_slot >= 0) & (entries[jnp.maximum(row_to_slot, 0), 2] > 0)
    slot = jnp.where(has, row_to_slot, jnp.int32(entries.shape[0]))
    order = jnp.lexsort((row_to_expert, slot)).astype(jnp.int32)
    slot, expert = slot[order], row_to_expert[order]
    changed = (slot[1:] != slot[:-1]) | (expert[1:] != expert[:-1])
    first = jnp.pad(changed, (1, 0), constant_values=True)
    segment_start = jax.lax.cummax(jnp.where(first, position, 0))
    begins = ((position - segment_start) % BLOCK == 0) & has[order]
    starts = jnp.nonzero(begins, size=rows, fill_value=0)[0].astype(jnp.int32)
    stop = jnp.pad(jnp.where(first, position, rows)[1:], (0, 1), constant_values=rows)
    segment_end = jax.lax.cummin(stop, reverse=True)
    counts = jnp.minimum(segment_end[starts] - starts, BLOCK)
    return order, starts, counts, jnp.sum(begins, dtype=jnp.int32)
