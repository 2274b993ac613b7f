"""Sums along rows whose bits do not depend on how many rows there are.

XLA orders a reduction by the shape of the whole array, so that one row alone would not get the bits
that it gets in a batch; a large one it may also hand to a library, together with the elementwise
maths around it (an exp beside a max). So a step has no XLA reduction over floats: sums go
through the matmul op, which has one order per result, and maxima through top-k. An op that is more
than such a sum (ops.rms_norm, ops.choose_experts) may have a kernel with an order of its own.
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


def scale_last_axis(
    x: Float[Array, "*rows size"], weight: Float[Array, "size"]
) -> Float[Array, "*rows size"]:
    """x * weight along the last axis, in x's dtype."""
    return x * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
