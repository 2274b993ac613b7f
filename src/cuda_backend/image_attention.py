"""Attention between patches by the Hopper kernel of csrc/image_attention/image_attention.cuh."""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Bool, Float, Int

HEAD_DIM = 72  # Qwen3-VL's; cuDNN takes as long for it as for 128


def check_support(dtype: jnp.dtype, dim: int) -> None:
    """Raise Declined, saying why, for what the kernel does not serve."""
    if dtype != jnp.bfloat16:
        raise Declined(f"cuda image_attention takes bfloat16, not {dtype}")
    if dim != HEAD_DIM:
        raise Declined(f"cuda image_attention takes heads of {HEAD_DIM}, not {dim}")


def image_attention(
    q: Float[Array, "patches heads dim"],
    k: Float[Array, "patches heads dim"],
    v: Float[Array, "patches heads dim"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    leading: bool,
) -> Float[Array, "patches heads dim"]:
    """softmax(scale q k^T) v over the first num_patches; rows after are 0.

    Products are of bfloat16, sums and exponentials float32, over blocks of 128 keys in order.
    """
    assert leading, "the op asks before"
    check_support(q.dtype, q.shape[-1])
    ffi.require()
    v = jnp.where(valid[:, None, None], v, jnp.zeros_like(v))  # padding may hold NaN
    call = jax.ffi.ffi_call("lora_jax_cuda_image_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(q, k, v, num_patches.reshape(1), scale=np.float32(scale))
