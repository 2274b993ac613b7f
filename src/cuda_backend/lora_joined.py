"""Adds adapters to maps of one x whose widths differ, as q, k and v, in one launch."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import lora_gemm, lora_groups
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.typing import Array, Float, Num


def joined_lora(
    ys: Sequence[Float[Array, "rows _"]],
    b_pools: Sequence[Num[Array, "b_rows _"]],
    batch: LoraBatch,
    sites: tuple[int, ...],
) -> tuple[Float[Array, "rows _"], ...]:
    """Return what lora_jax.ops.joined_lora does, of few rows of few adapters in bfloat16.

    Works in place, by csrc/lora_gemm/decode.cuh. Others are declined: they are a launch a width.
    """
    if len(ys) > lora_gemm.MAX_MODULES:
        raise Declined(f"cuda joined_lora takes up to {lora_gemm.MAX_MODULES} maps, not {len(ys)}")
    arrays = *ys, *b_pools, batch.x, batch.a_pool
    if others := {str(a.dtype) for a in arrays if a.dtype != jnp.bfloat16}:
        raise Declined(f"cuda joined_lora takes bfloat16, not {', '.join(sorted(others))}")
    listed = lora_groups.items_of(batch, [y.shape[1] for y in ys])
    ranks = -(-batch.max_rank // 8) * 8
    h = jax.ShapeDtypeStruct((len(ys), len(batch.x), ranks), batch.x.dtype)
    shapes = [h, *(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in ys)]
    aliases = {7 + 2 * m: 1 + m for m in range(len(ys))}
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_joined", shapes, input_output_aliases=aliases)
    maps = (array for pair in zip(ys, b_pools, strict=True) for array in pair)
    tables = batch.entries, batch.scaling
    places, rank = np.array(sites, np.int64), np.int64(batch.max_rank)
    done = call(batch.x, batch.a_pool, *listed, *tables, *maps, sites=places, max_rank=rank)
    return tuple(done[1:])
