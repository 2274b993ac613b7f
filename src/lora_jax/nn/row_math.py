"""Sums along rows whose bits do not depend on how many rows there are.

XLA orders a reduction by the shape of the whole array, so that one row alone would not get the bits
that it gets in a batch; a large one it may also hand to a library, together with the elementwise
maths around it (an exp beside a max). So a step has no XLA reduction over floats: sums go
through the matmul op, which has one order per result, and maxima through top-k. What is more than
such a sum may be a backend's one kernel, with an order of its own; dispatch decides as for an op.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lora_jax.ops import dispatch
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


def kernels(name: str, composed: Callable) -> dict[str, Callable]:
    """Return the implementations of what a backend may have whole: its kernel, else `composed`."""
    portable = dict.fromkeys(("pallas_gpu", "pallas_tpu", "ffi", "xla", "reference"), composed)
    return {"cuda": dispatch.backend("cuda", name), **portable}


def scale_last_axis(
    x: Float[Array, "*rows size"], weight: Float[Array, "size"]
) -> Float[Array, "*rows size"]:
    """x * weight along the last axis, in x's dtype."""
    return x * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def add_rms_norm(
    x: Float[Array, "rows size"],
    addend: Float[Array, "rows size"] | None,
    weight: Float[Array, "size"],
    eps: float,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """Return x + addend (x without one), and s / sqrt(mean(s^2) + eps) * weight of that sum s.

    The norm is computed in float32 and rounded once.
    """
    return dispatch.call(_NORMS, None, x, addend, weight, eps)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*rows size"], weight: Float[Array, "size"], eps: float
) -> Float[Array, "*rows size"]:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis; differentiable."""
    flat = x.reshape(-1, x.shape[-1])
    return add_rms_norm(flat, None, weight, eps)[1].reshape(x.shape)


@rms_norm.defjvp
def _rms_norm_jvp(eps, primals, tangents):
    def composed(x, weight):
        return _composed_norm(x, None, weight, eps)[1]

    return rms_norm(*primals, eps), jax.jvp(composed, primals, tangents)[1]


def _composed_norm(x, addend, weight, eps):
    x = x if addend is None else x + addend
    wide = x.astype(jnp.float32)
    mean_square = row_sum(wide * wide) / x.shape[-1]
    normed = wide * jax.lax.rsqrt(mean_square + eps)
    return x, scale_last_axis(normed, weight).astype(x.dtype)


_NORMS = kernels("rms_norm", _composed_norm)
