"""Attention between patches by cuDNN, which computes heads of 72 as if they had 128."""

import jax
import jax.numpy as jnp

from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Bool, Float, Int

MAX_DIM, DIM_STEP = 128, 8


def check_support(dtype: jnp.dtype, dim: int) -> None:
    """Raise Declined, saying why, for what cuDNN does not take."""
    if dtype != jnp.bfloat16:
        raise Declined(f"cudnn takes bfloat16, not {dtype}")
    if dim % DIM_STEP or dim > MAX_DIM:
        raise Declined(f"cudnn takes heads to {MAX_DIM} in steps of {DIM_STEP}, not {dim}")
    if jax.default_backend() != "gpu":
        raise Declined(f"cudnn cannot run on {jax.default_backend()}")


def attend(
    q: Float[Array, "patches heads dim"],
    k: Float[Array, "patches heads dim"],
    v: Float[Array, "patches heads dim"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    leading: bool,
) -> Float[Array, "patches heads dim"]:
    """softmax(scale q k^T) v over the first num_patches; rows after are 0.

    Padding may hold NaN, which times a weight of 0 is NaN, and is cleared first.
    """
    assert leading, "the op asks before"
    check_support(q.dtype, q.shape[-1])
    real, length = valid[:, None, None], num_patches[None].astype(jnp.int32)
    out = jax.nn.dot_product_attention(
        *(jnp.where(real, x, jnp.zeros_like(x))[None] for x in (q, k, v)),
        scale=scale,
        query_seq_lengths=length,
        key_value_seq_lengths=length,
        implementation="cudnn",
    )[0]
    return jnp.where(real, out, jnp.zeros_like(out))
