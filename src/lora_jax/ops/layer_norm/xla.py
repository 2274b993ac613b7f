"""The layer norm with sums whose bits do not depend on how many rows there are: portable JAX."""

import jax
import jax.numpy as jnp

from lora_jax.ops.row_sum import row_sum, scale_last_axis
from lora_jax.typing import Array, Float


def layer_norm(
    x: Float[Array, "*rows size"],
    weight: Float[Array, "size"],
    bias: Float[Array, "size"] | None,
    eps: float,
) -> Float[Array, "*rows size"]:
    """Same result as the reference; differentiable."""
    wide = x.astype(jnp.float32)
    centred = wide - row_sum(wide) / x.shape[-1]
    variance = row_sum(centred * centred) / x.shape[-1]
    scaled = scale_last_axis(centred * jax.lax.rsqrt(variance + eps), weight)
    if bias is not None:
        shape = (1,) * (x.ndim - 1) + (-1,)
        scaled = scaled + bias.astype(jnp.float32).reshape(shape)
    return scaled.astype(x.dtype)
