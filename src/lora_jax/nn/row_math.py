"""Sums along rows whose bits do not depend on how many rows there are.

XLA orders a reduction by the shape of the whole array, so that one row alone would not get the bits
that it gets in a batch; a large one it may also hand to a library, together with the elementwise
maths around it (an exp beside a max). So a step has no XLA reduction over floats: sums go
through the matmul op, which has one order per result, and maxima through top-k.
"""

import jax
import jax.numpy as jnp

from lora_jax.ops.grouped_matmul import matmul
from lora_jax.typing import Array, Float


@jax.custom_jvp
def row_sum(x: Float[Array, "*rows size"]) -> Float[Array, "*rows 1"]:
    """Return the sum over the last axis, x being float32; differentiable."""
    flat = x.reshape(-1, x.shape[-1])
    ones = jnp.ones((1, x.shape[-1]), x.dtype)
    return matmul(flat, ones, jnp.int32(flat.shape[0])).reshape(*x.shape[:-1], 1)


@row_sum.defjvp
def _row_sum_jvp(primals, tangents):
    return row_sum(*primals), jnp.sum(tangents[0], axis=-1, keepdims=True)
