"""s / sqrt(mean(s^2) + eps) * weight of s = x + addend, in plain jnp: the meaning of the op."""

import jax.numpy as jnp

from lora_jax.typing import Array, Float


def add_rms_norm(
    x: Float[Array, "*rows size"],
    addend: Float[Array, "*rows size"] | None,
    weight: Float[Array, "size"],
    eps: float,
) -> tuple[Float[Array, "*rows size"], Float[Array, "*rows size"]]:
    """Return s in x's dtype, and the norm of s, computed in float32 and rounded once.

    Without an addend s is x.
    """
    s = x if addend is None else x + addend
    wide = s.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scale = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return s, (wide / jnp.sqrt(mean_square + jnp.float32(eps)) * scale).astype(x.dtype)
