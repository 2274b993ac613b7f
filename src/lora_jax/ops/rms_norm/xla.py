"""The RMS norm with sums whose bits do not depend on how many rows there are: portable JAX."""

import jax
import jax.numpy as jnp

from lora_jax.ops.row_sum import row_sum, scale_last_axis
from lora_jax.typing import Array, Float


def add_rms_norm(
    x: Float[Array, "*rows size"],
    addend: Float[Array, "*rows size"] | None,
    weight: Float[Array, "size"],
    eps: float,
) -> tuple[Float[Array, "*rows size"], Float[Array, "*rows size"]]:
    """Same result as the reference; differentiable."""
    x = x if addend is None else x + addend
    wide = x.astype(jnp.float32)
    mean_square = row_sum(wide * wide) / x.shape[-1]
    normed = wide * jax.lax.rsqrt(mean_square + eps)
    return x, scale_last_axis(normed, weight).astype(x.dtype)
