"""Adds adapters to rows on a Hopper GPU by two persistent Mosaic kernels, in place on y.

Rows are sorted by (slot, expert) and cut into items: rows of one segment within one tile of rows.
`shrink` gives x A^T in float32, one part for each piece of d_in; XLA adds the parts, scales and
rounds to bfloat16; `expand` adds the product with B to the rows of y where they lie. Rank rows are
wgmma's M operand in one and its K in the other, rows of x its N: an item of one row costs a tile of
8. Adapters read their own rank rows, in steps of 8 to 64 rows of A and of 16 rows of B.

A row's result is made of sums whose order depends on the widths and its own adapter alone, so tiles
come from a table of this device, or from a formula, and change no bit.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from lora_jax.ops import hopper, tuning_table
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.lora_gemm._gpu_expand import expand
from lora_jax.ops.lora_gemm._gpu_schedule import (
    ALIGN,
    MAX_RANK,
    STEP,
    LoraGemmConfig,
    LoraGemmSchedule,
    find_config,
    fitted,
    make_schedule,
    rank_steps,
)
from lora_jax.ops.lora_gemm._gpu_shrink import shrink
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.typing import Array, Float, Int


def lora_gemm(
    y: Float[Array, "rows d_out"],
    batch: LoraBatch,
    *,
    config: LoraGemmConfig | None = None,
    interpret: hopper.Interpret = None,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference, s (x A^T) rounded to bfloat16; base rows cost nothing.

    `interpret`: see hopper.require. Raises Declined for another machine or dtype, widths
    that are no multiples of 64, pools that are no multiples of 8 rows, and ranks above 128.
    """
    x, a_pool, b_pool = batch.x, batch.a_pool, batch.b_pool
    entries, scaling, max_rank = batch.entries, batch.scaling, batch.max_rank
    row_to_slot, row_to_expert = batch.row_to_slot, batch.row_to_expert
    _require(y, x, a_pool, b_pool, max_rank, interpret)
    sizes = {"rank": max_rank, "d_out": y.shape[1], "d_in": x.shape[1]}
    config = config or _find({"rows": x.shape[0], "slots": entries.shape[0], **sizes})
    table, owners = (entries, scaling), (row_to_slot, row_to_expert)
    return _launch(y, x, a_pool, b_pool, *table, *owners, max_rank, config, interpret)


# Equal launches of a program's layers are traced and lowered once; XLA plans equal rows once.
@functools.partial(jax.jit, static_argnames=("max_rank", "config", "interpret"))
def _launch(
    y: Float[Array, "rows d_out"],
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"],
    max_rank: int,
    config: LoraGemmConfig,
    interpret: hopper.Interpret,
) -> Float[Array, "rows d_out"]:
    """Return what lora_gemm says, by these tiles."""
    schedule = make_schedule(entries, scaling, row_to_slot, row_to_expert, config.rows)
    parts = shrink(x[schedule.order], a_pool, schedule, max_rank, config, interpret)
    h = _sum_parts(parts, schedule, max_rank)
    return expand(y, h, b_pool, schedule, config, interpret)


def _find(shape: Mapping[str, int]) -> LoraGemmConfig:
    """Return the tiles that were found best on this device at about this shape, or a guess."""
    config = tuning_table.find("lora_gemm", shape, LoraGemmConfig)
    if config is None:
        return find_config(shape["rows"], shape["slots"], shape["rank"])
    return fitted(config, shape["rank"])


def _require(y, x, a_pool, b_pool, max_rank: int, interpret: hopper.Interpret) -> None:
    """Raise Declined, saying why, for what the kernels do not serve."""
    hopper.require("lora_gemm", x.dtype, interpret)
    rows, widths = x.shape[0], (x.shape[1], y.shape[1])
    pools = (a_pool.shape[0], b_pool.shape[0])
    if rows < 1 or any(w % hopper.COLUMNS or w == 0 for w in widths):
        raise Declined(
            f"lora_gemm on Mosaic GPU takes widths in steps of {hopper.COLUMNS}, not {widths}, "
            f"and at least one row, not {rows}"
        )
    if any(n % ALIGN or n == 0 for n in pools):
        raise Declined(f"lora_gemm on Mosaic GPU takes pools in steps of {ALIGN} rows, not {pools}")
    if max_rank > MAX_RANK:
        raise Declined(f"lora_gemm on Mosaic GPU takes ranks to {MAX_RANK}, not {max_rank}")


def _sum_parts(
    parts: Float[Array, "pieces padded rank_rows"], schedule: LoraGemmSchedule, max_rank: int
) -> Float[Array, "steps padded 16"]:
    """Return h[c, p, k] = s * x[p] . A[j] in bfloat16, b_low + j = 16 c + k; 0 beyond the rank."""
    steps = rank_steps(max_rank)
    column = jnp.arange(steps * STEP, dtype=jnp.int32)[None, :] - schedule.b_low[:, None]
    inside = (column >= 0) & (column < schedule.rank[:, None])
    source = jnp.where(inside, column + schedule.a_low[:, None], 0)
    total = jnp.take_along_axis(parts[0], source, axis=1)
    for part in parts[1:]:
        total = total + jnp.take_along_axis(part, source, axis=1)
    h = jnp.where(inside, total * schedule.scaling[:, None], 0).astype(jnp.bfloat16)
    return h.reshape(-1, steps, STEP).transpose(1, 0, 2)
