"""silu(gate) * up of two products with their adapters, where the adapters are added.

Few rows of few adapters are one launch of csrc/lora_gemm/decode_gated.cuh. Rows of which some may
be in tiles have their tiles added and multiplied by csrc/lora_gemm/prefill_gated.cuh. Others are
declined: their adapters are added in the launches of lora_gemm.py, with the same bits.
"""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi, lora_gemm, lora_groups
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.typing import Array, Float, Int

TILES_RANK = 32  # B would fill the registers


def lora_silu_times(
    gate: Float[Array, "rows width"],
    up: Float[Array, "rows width"],
    num_rows: Int[Array, ""],
    batch: LoraBatch,
    sites: tuple[int, int],
) -> Float[Array, "rows width"]:
    """Return what lora_jax.ops.lora_silu does, in bfloat16, of few rows or of tiles."""
    arrays = gate, up, batch.x, batch.a_pool, batch.b_pool
    if others := {str(a.dtype) for a in arrays if a.dtype != jnp.bfloat16}:
        raise Declined(f"cuda lora_silu_times takes bfloat16, not {', '.join(sorted(others))}")
    rows, d_in = batch.x.shape
    if bad := [w for w in (d_in, batch.d_out) if w % lora_gemm.COLUMNS or not w]:
        raise Declined(
            f"cuda lora_silu_times takes widths in steps of {lora_gemm.COLUMNS}, not {bad}"
        )
    ranks = -(-batch.max_rank // 8) * 8
    y = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    operands = batch.entries, batch.scaling, num_rows.reshape(1)
    attributes = {"sites": np.array(sites, np.int64), "max_rank": np.int64(batch.max_rank)}
    pools = batch.x, batch.a_pool, batch.b_pool
    if batch.items is not None and batch.items.tiles is not None:
        listed = _tiled(batch.items, rows, batch.max_rank)
        ffi.require()
        work = jax.ShapeDtypeStruct((4, rows, ranks), gate.dtype)  # of items and of tiles
        aliases = {8: 1, 9: 2}
        name = "lora_jax_cuda_lora_gated_tiles"
        call = jax.ffi.ffi_call(name, (work, y, y, y), input_output_aliases=aliases)
        return call(*pools, *listed, gate, up, *operands, **attributes)[3]
    listed = lora_groups.items_of(batch, (batch.d_out,) * 2)
    h = jax.ShapeDtypeStruct((2, rows, ranks), gate.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_gated", (h, y))
    return call(*pools, *listed, gate, up, *operands, **attributes)[1]


def _tiled(items: AdapterItems, rows: int, max_rank: int) -> tuple:
    """Return a launch's items and tiles, or raise Declined for other rows than linear maps'."""
    if items.in_order:
        raise Declined("cuda lora_silu_times takes tiles of linear maps, not of experts")
    if rows > lora_gemm.MAX_ROWS or max_rank > TILES_RANK:
        raise Declined(
            f"cuda lora_silu_times takes tiles of up to {lora_gemm.MAX_ROWS} rows and ranks to "
            f"{TILES_RANK}, not {rows} and {max_rank}"
        )
    arrays = items.order, items.items, items.num_items, items.tiles
    return lora_gemm.CudaWorkList(*arrays, shrinks_tiles=True).tiled_arrays
