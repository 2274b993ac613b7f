"""w + scaling * B^T A for every matrix of a module, in plain jnp: the meaning of the op."""

import jax
import jax.numpy as jnp

from lora_jax.typing import Array, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST


def merge(
    w: Float[Array, "matrices d_out d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    sites: Int[Array, "matrices 3"],
    scaling: Float[Array, "matrices"],
    max_rank: int,
) -> Float[Array, "matrices d_out d_in"]:
    """w[m] + scaling[m] * sum_j B[j]^T A[j], j < rank; sums in float32, one rounding.

    A[j] = a_pool[a_row + j], B[j] = b_pool[b_row + j].
    """
    j = jnp.arange(max_rank, dtype=jnp.int32)
    live = j[None] < sites[:, 2:]
    a = a_pool[jnp.where(live, sites[:, 0:1] + j[None], 0)].astype(jnp.float32)
    b = b_pool[jnp.where(live, sites[:, 1:2] + j[None], 0)].astype(jnp.float32)
    a, b = (jnp.where(live[:, :, None], v, jnp.float32(0)) for v in (a, b))
    delta = jnp.einsum("mro,mri->moi", b, a, precision=HIGHEST)
    merged = (w.astype(jnp.float32) + scaling[:, None, None] * delta).astype(w.dtype)
    return jnp.where(sites[:, 2, None, None] > 0, merged, w)
