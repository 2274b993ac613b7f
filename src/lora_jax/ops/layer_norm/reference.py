"""(x - mean) / sqrt(variance + eps) * weight + bias, in plain jnp: the meaning of the op."""

import jax.numpy as jnp

from lora_jax.typing import Array, Float


def layer_norm(
    x: Float[Array, "*rows size"],
    weight: Float[Array, "size"],
    bias: Float[Array, "size"] | None,
    eps: float,
) -> Float[Array, "*rows size"]:
    """Return the norm over the last axis, computed in float32 and rounded once."""
    wide, shape = x.astype(jnp.float32), (1,) * (x.ndim - 1) + (-1,)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normed = centred / jnp.sqrt(variance + jnp.float32(eps))
    scaled = normed * weight.astype(jnp.float32).reshape(shape)
    if bias is not None:
        scaled = scaled + bias.astype(jnp.float32).reshape(shape)
    return scaled.astype(x.dtype)
