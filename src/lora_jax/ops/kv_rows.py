"""Rows of KV pages in 8 bits: e4m3 values and a tail of 16 bytes that begins with their scale.

A row is one token's K or V of one head, so its scale needs no calibration and follows from nothing
but the token. The tail lets rows begin at multiples of 16 bytes, which a GPU's copy engine wants.
The scale, a float32, is the least power of two with which all values are within e4m3's 448: only
the values are rounded, once. A row with a value that is not finite has NaN as its scale.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.typing import Array, Float, Int, Num

CODED = jnp.dtype(jnp.uint8)  # of pages that hold such rows
TAIL_BYTES = 16  # behind the values
SCALE_BYTES = 4  # of them
_SCALE = slice(-TAIL_BYTES, SCALE_BYTES - TAIL_BYTES)  # its place in a row
_BIAS, _MANTISSA_BITS = 127, 23
_BELOW_448 = 0x1FFFFF  # 448 is 1.75 * 2^8: a larger mantissa needs the next power of two
_TOP = 8


def stored_dim(dim: int, dtype: Any) -> int:
    """Return the items that a row of so many values takes in pages of a dtype; none take none."""
    return dim + TAIL_BYTES if dim and jnp.dtype(dtype) == CODED else dim


def coded(rows: Float[Array, "*lead dim"]) -> Num[Array, "*lead items"]:
    """Return rows in 8 bits."""
    wide = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent = jnp.maximum((bits + _BELOW_448) >> _MANTISSA_BITS, _TOP + 1) - _TOP
    scale, inverse = (_power(e) for e in (exponent, 2 * _BIAS - exponent))
    values = (wide * inverse).astype(jnp.float8_e4m3fn)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.float32(jnp.nan))
    tail = jax.lax.bitcast_convert_type(scale[..., 0], jnp.uint8)
    tail = jnp.pad(tail, ((0, 0),) * (tail.ndim - 1) + ((0, TAIL_BYTES - SCALE_BYTES),))
    return jnp.concatenate([jax.lax.bitcast_convert_type(values, jnp.uint8), tail], axis=-1)


def _power(exponent: Int[Array, "*lead"]) -> Float[Array, "*lead"]:
    """Return 2^(exponent - 127) in float32."""
    return jax.lax.bitcast_convert_type(exponent << _MANTISSA_BITS, jnp.float32)


def decoded(rows: Num[Array, "*lead items"]) -> Float[Array, "*lead dim"]:
    """Return rows of pages in float32."""
    if rows.dtype != CODED:
        return rows.astype(jnp.float32)
    values = jax.lax.bitcast_convert_type(rows[..., :-TAIL_BYTES], jnp.float8_e4m3fn)
    scales = jax.lax.bitcast_convert_type(rows[..., _SCALE], jnp.float32)
    return values.astype(jnp.float32) * scales[..., None]
