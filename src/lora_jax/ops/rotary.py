"""Turns heads by their tokens' angles: rotary position embedding."""

import jax.numpy as jnp

from lora_jax.typing import Array, Float


def rotate(
    x: Float[Array, "tokens heads dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "tokens heads dim"]:
    """Return x turned by its token's angles, pair by pair, computed in float32.

    A pair is (i, i + dim / 2), or (2 i, 2 i + 1) when `interleaved` (DeepSeek's order).
    """
    wide = x.astype(jnp.float32)
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
