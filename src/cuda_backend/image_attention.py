"""Attention between patches by the Hopper kernels of csrc/image_attention."""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Bool, Float, Int

HEAD_DIM = 72  # Qwen3-VL's; cuDNN takes as long for it as for 128
PIECES = 10  # of 8 columns that a head takes in memory
MAX_HEADS = 100  # q, k or v of 16 patches, of all heads, lie in a CTA's shared memory
QUERIES, KEYS = 192, 112  # of a tile; a block of memory is 8 of either


def check_support(dtype: jnp.dtype, heads: int, dim: int) -> None:
    """Raise Declined, saying why, for what the kernels do not serve."""
    if dtype != jnp.bfloat16:
        raise Declined(f"cuda turned_attention takes bfloat16, not {dtype}")
    if dim != HEAD_DIM:
        raise Declined(f"cuda turned_attention takes heads of {HEAD_DIM}, not {dim}")
    if heads > MAX_HEADS:
        raise Declined(f"cuda turned_attention takes up to {MAX_HEADS} heads, not {heads}")


def turned_attention(
    qkv: Float[Array, "patches 3 heads dim"],
    cos: Float[Array, "patches half"],
    sin: Float[Array, "patches half"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    leading: bool,
) -> Float[Array, "patches heads dim"]:
    """softmax(scale q k^T) v over the first num_patches, q and k turned before; rows after are 0.

    Products are of bfloat16, sums and exponentials float32, over blocks of keys in an order that
    the number of patches gives.
    """
    assert leading, "the op asks before"
    patches, _, heads, dim = qkv.shape
    check_support(qkv.dtype, heads, dim)
    ffi.require()
    rows = max(-(-patches // size) * size for size in (QUERIES, KEYS))
    out = jax.ShapeDtypeStruct((patches, heads, dim), qkv.dtype)
    laid = jax.ShapeDtypeStruct((3, heads, rows // 8, PIECES, 8, 8), qkv.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_turned_attention", (out, laid))
    return call(qkv, cos, sin, num_patches.reshape(1), scale=np.float32(scale))[0]
