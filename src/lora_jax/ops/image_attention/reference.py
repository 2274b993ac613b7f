"""Meaning of attention between patches: all scores at once, in float32."""

import jax
import jax.numpy as jnp

from lora_jax.ops.image_attention.xla import product
from lora_jax.typing import Array, Bool, Float, Int


def attend(
    q: Float[Array, "patches heads dim"],
    k: Float[Array, "patches heads dim"],
    v: Float[Array, "patches heads dim"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    leading: bool,
) -> Float[Array, "patches heads dim"]:
    """softmax(scale q k^T) v over the valid patches; rows of padding are 0."""
    del num_patches, leading
    real = valid[:, None, None]
    q, k, v = (jnp.where(real, x, jnp.zeros_like(x)) for x in (q, k, v))
    scores = product("qhd,khd->hqk", q, k) * jnp.float32(scale)
    scores = jnp.where(valid[None, None], scores, -jnp.inf)
    weights = jnp.where(valid[None, :, None], jax.nn.softmax(scores, axis=-1), 0.0)
    return product("hqk,khd->qhd", weights.astype(v.dtype), v).astype(q.dtype)
