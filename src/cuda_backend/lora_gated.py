"""silu(gate) * up of two products with their adapters, by csrc/lora_gemm/decode_gated.cuh.

For few rows of few adapters. Other rows are declined: their adapters are added in the launches of
lora_gemm.py, with the same bits.
"""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi, lora_gemm
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.typing import Array, Float, Int

MAX_RANK, MAX_D_IN = 64, 8192
UNIT_RANKS = 16  # of a unit of the shrink
# Units of the shrink that a launch may have, and blocks of 64 columns of the expand, where every
# slot has rows: by what an H200's CTAs do at once (are_few_slots in csrc/lora_gemm/launch.cuh).
MOST_UNITS, MOST_BLOCKS = 128, 28 * 264


def lora_silu_times(
    gate: Float[Array, "rows width"],
    up: Float[Array, "rows width"],
    num_rows: Int[Array, ""],
    batch: LoraBatch,
    sites: tuple[int, int],
) -> Float[Array, "rows width"]:
    """Return what lora_jax.ops.lora_silu does, of few rows of few adapters in bfloat16."""
    rows, d_in = batch.x.shape
    slots = batch.entries.shape[-2]
    check_support(rows, d_in, batch.d_out, slots, batch.max_rank)
    arrays = gate, up, batch.x, batch.a_pool, batch.b_pool
    if others := {str(a.dtype) for a in arrays if a.dtype != jnp.bfloat16}:
        raise Declined(f"cuda lora_silu_times takes bfloat16, not {', '.join(sorted(others))}")
    ffi.require()
    items = batch.items
    if items is None:
        items = lora_gemm.row_items(batch.row_to_slot, batch.row_to_expert, slots, batch.max_rank)
    elif not _are_small(items, slots, batch.max_rank):
        raise Declined("cuda lora_silu_times takes items of up to 8 rows, of linear maps")
    ranks = -(-batch.max_rank // 8) * 8
    h = jax.ShapeDtypeStruct((2, rows, ranks), gate.dtype)
    y = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_gated", (h, y))
    pools, listed = (batch.x, batch.a_pool, batch.b_pool), (items.order, items.items)
    tables, real = (batch.entries, batch.scaling), num_rows.reshape(1)
    places = np.array(sites, np.int64)
    attributes = {"sites": places, "max_rank": np.int64(batch.max_rank)}
    return call(*pools, *listed, items.num_items, gate, up, *tables, real, **attributes)[1]


def check_support(rows: int, d_in: int, width: int, slots: int, max_rank: int) -> None:
    """Raise Declined, saying why, for what this kernel does not serve, or is not the faster for."""
    most = lora_gemm.FEW_ROWS_OF_FEW_SLOTS
    if not 1 <= rows <= most or slots > lora_gemm.FEW_SLOTS:
        raise Declined(
            f"cuda lora_silu_times takes up to {most} rows of up to {lora_gemm.FEW_SLOTS} slots, "
            f"not {rows} of {slots}"
        )
    if max_rank > MAX_RANK or d_in > MAX_D_IN:
        raise Declined(
            f"cuda lora_silu_times takes ranks to {MAX_RANK} and d_in to {MAX_D_IN}, not "
            f"{max_rank} and {d_in}"
        )
    if bad := [w for w in (d_in, width) if w % lora_gemm.COLUMNS or not w]:
        raise Declined(
            f"cuda lora_silu_times takes widths in steps of {lora_gemm.COLUMNS}, not {bad}"
        )
    items = min(rows, rows // lora_gemm.SMALL_ITEM + slots)
    units, blocks = 2 * items * -(-max_rank // UNIT_RANKS), 2 * slots * width // lora_gemm.COLUMNS
    if units > MOST_UNITS or blocks > MOST_BLOCKS:
        raise Declined(
            f"cuda lora_silu_times takes up to {MOST_UNITS} units of {UNIT_RANKS} ranks and "
            f"{MOST_BLOCKS} blocks of {lora_gemm.COLUMNS} columns, not {units} and {blocks}"
        )


def _are_small(items: AdapterItems, slots: int, max_rank: int) -> bool:
    """Return whether these are all rows of linear maps, in items of at most 8."""
    in_items = not items.in_order and items.tiles is None
    return in_items and lora_gemm.are_small(items, len(items.order), slots, max_rank)
