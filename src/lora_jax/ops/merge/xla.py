"""Merges matrix by matrix in place: portable JAX that holds one matrix of float32 at a time."""

import jax

from lora_jax.ops.merge import reference
from lora_jax.typing import Array, Float, Int


def merge(
    w: Float[Array, "matrices d_out d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    sites: Int[Array, "matrices 3"],
    scaling: Float[Array, "matrices"],
    max_rank: int,
) -> Float[Array, "matrices d_out d_in"]:
    """Same result as the reference."""

    def one(m, w):
        site, scale = sites[m][None], scaling[m][None]
        old = jax.lax.dynamic_slice_in_dim(w, m, 1)
        new = reference.merge(old, a_pool, b_pool, site, scale, max_rank)
        return jax.lax.dynamic_update_slice_in_dim(w, new, m, 0)

    return jax.lax.fori_loop(0, w.shape[0], one, w)
