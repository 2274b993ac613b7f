"""y + scaling * (x A^T) B for rows of many adapters, in plain jnp: the meaning of the op."""

import jax
import jax.numpy as jnp

from lora_jax.ops.lora_gemm.batch import LoraBatch, float_rows
from lora_jax.typing import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST


def lora_gemm(
    y: Float[Array, "rows d_out"],
    batch: LoraBatch,
) -> Float[Array, "rows d_out"]:
    """y[t] + s * sum_j (x[t] . A[j]) B[j], j < rank of slot row_to_slot[t]; slot -1 adds nothing.

    A[j] = a_pool[a_offset + e * a_stride + j], B[j] = b_pool[b_offset + e * b_stride + j],
    e = row_to_expert[t]. Sums are in float32.
    """
    x, a_pool, b_pool = batch.x, batch.a_pool, batch.b_pool
    entries, scaling, max_rank = batch.entries, batch.scaling, batch.max_rank
    row_to_slot, row_to_expert = batch.row_to_slot, batch.row_to_expert
    slot = jnp.maximum(row_to_slot, 0)
    a_off, b_off, rank, a_stride, b_stride = (entries[slot, c] for c in range(5))
    j = jnp.arange(max_rank, dtype=jnp.int32)
    live = (j[None] < rank[:, None]) & (row_to_slot >= 0)[:, None]
    a_rows = jnp.where(live, (a_off + row_to_expert * a_stride)[:, None] + j[None], 0)
    b_rows = jnp.where(live, (b_off + row_to_expert * b_stride)[:, None] + j[None], 0)
    f32 = jnp.float32
    h = jnp.einsum("td,trd->tr", x.astype(f32), float_rows(a_pool[a_rows]), precision=HIGHEST)
    h = jnp.where(live, h, 0.0) * scaling[slot][:, None]
    b = jnp.where(live[:, :, None], float_rows(b_pool[b_rows]), 0.0)
    delta = jnp.einsum("tr,trd->td", h, b, precision=HIGHEST)
    z = y.astype(f32) + delta
    return jnp.where((row_to_slot >= 0)[:, None], z.astype(y.dtype), y)
