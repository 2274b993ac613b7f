"""Rows for the kernels of csrc/lora_gemm that serve all their items by groups.

They are few, of few adapters: csrc/lora_gemm/decode_groups.cuh says what a group is.
"""

from collections.abc import Sequence

import jax

from cuda_backend import ffi, lora_gemm
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.lora_gemm.batch import LoraBatch

MAX_RANK, MAX_D_IN = 64, 8192
UNIT_RANKS = 16  # of a unit of the shrink
# Units of the shrink that a launch may have, and blocks of 64 columns of the expand, where every
# slot has rows: by what an H200's CTAs do at once (are_few_slots in csrc/lora_gemm/launch.cuh).
MOST_UNITS, MOST_BLOCKS = 128, 28 * 264


def items_of(batch: LoraBatch, widths: Sequence[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rows' order, items and number of items for maps of these widths, or decline."""
    (rows, d_in), slots = batch.x.shape, batch.entries.shape[-2]
    check_few(rows, d_in, widths, slots, batch.max_rank)
    ffi.require()
    items = batch.items
    if items is None:
        items = lora_gemm.row_items(batch.row_to_slot, batch.row_to_expert, slots, batch.max_rank)
    elif not are_small(items, slots, batch.max_rank):
        raise Declined("cuda launches by groups take items of up to 8 rows, of linear maps")
    return items.order, items.items, items.num_items


def check_few(rows: int, d_in: int, widths: Sequence[int], slots: int, max_rank: int) -> None:
    """Raise Declined, saying why, for what is not served, or is served faster otherwise."""
    most = lora_gemm.FEW_ROWS_OF_FEW_SLOTS
    if not 1 <= rows <= most or slots > lora_gemm.FEW_SLOTS:
        raise Declined(
            f"cuda launches by groups take up to {most} rows of up to {lora_gemm.FEW_SLOTS} slots, "
            f"not {rows} of {slots}"
        )
    if max_rank > MAX_RANK or d_in > MAX_D_IN:
        raise Declined(
            f"cuda launches by groups take ranks to {MAX_RANK} and d_in to {MAX_D_IN}, not "
            f"{max_rank} and {d_in}"
        )
    if bad := [w for w in (d_in, *widths) if w % lora_gemm.COLUMNS or not w]:
        raise Declined(
            f"cuda launches by groups take widths in steps of {lora_gemm.COLUMNS}, not {bad}"
        )
    items = min(rows, rows // lora_gemm.SMALL_ITEM + slots)
    units = len(widths) * items * -(-max_rank // UNIT_RANKS)
    blocks = slots * sum(widths) // lora_gemm.COLUMNS
    if units > MOST_UNITS or blocks > MOST_BLOCKS:
        raise Declined(
            f"cuda launches by groups take up to {MOST_UNITS} units of {UNIT_RANKS} ranks and "
            f"{MOST_BLOCKS} blocks of {lora_gemm.COLUMNS} columns, not {units} and {blocks}"
        )


def are_small(items: AdapterItems, slots: int, max_rank: int) -> bool:
    """Return whether these are rows of linear maps, in items of at most 8, and in no tiles."""
    whole = not items.in_order and items.tiles is None
    return whole and lora_gemm.are_small(items, len(items.order), slots, max_rank)
