"""Attention between patches by the C++ kernel of ops/cpu/image_attention.h."""

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Bool, Float, Int

DTYPES = ("float32", "bfloat16")


def attend(
    q: Float[Array, "patches heads dim"],
    k: Float[Array, "patches heads dim"],
    v: Float[Array, "patches heads dim"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    leading: bool,
) -> Float[Array, "patches heads dim"]:
    """Same result as the reference: no scores are kept, and rows of padding are 0."""
    del leading
    none = jnp.zeros((0, 0), jnp.float32)
    return _call((q, k, v), (none, none), valid, num_patches, scale, 1)


def turned(
    qkv: Float[Array, "patches 3 heads dim"],
    cos: Float[Array, "patches half"],
    sin: Float[Array, "patches half"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    leading: bool,
    images: int,
) -> Float[Array, "patches heads dim"]:
    """Same result as the reference, each image alone; rows of padding are 0."""
    del leading
    none = jnp.zeros((0, 0, 0), qkv.dtype)
    return _call((qkv, none, none), (cos, sin), valid, num_patches, scale, images)


def _call(
    heads: tuple[Array, Array, Array],
    angles: tuple[Array, Array],
    valid: Array,
    num_patches: Array,
    scale: float,
    images: int,
) -> Array:
    build.require()
    dtype = heads[0].dtype
    if dtype.name not in DTYPES:
        raise Declined(f"takes heads in {' or '.join(DTYPES)}, not {dtype}")
    shape = (valid.shape[0], *heads[0].shape[-2:])
    call = jax.ffi.ffi_call(
        f"lora_jax_image_attention_{dtype.name}", jax.ShapeDtypeStruct(shape, dtype)
    )
    options = {"scale": np.float32(scale), "images": np.int64(images)}
    return call(*heads, *angles, valid, num_patches.reshape(1), **options)
