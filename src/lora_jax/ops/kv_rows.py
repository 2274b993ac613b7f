"""Rows of KV pages in 8 bits: e4m3 values and, in the last four bytes, their float32 scale.

A row is one token's K or V of one head, so its scale needs no calibration and follows from nothing
but the token. The scale is the least power of two with which all values are within e4m3's 448:
only the values are rounded, once. A row with a value that is not finite has NaN as its scale.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.typing import Array, Float, Int, Num

CODED = jnp.dtype(jnp.uint8)  # of pages that hold such rows
SCALE_BYTES = 4
_BIAS, _MANTISSA_BITS = 127, 23
_BELOW_448 = 0x1FFFFF  # 448 is 1.75 * 2^8: a larger mantissa needs the next power of two
_TOP = 8


def stored_dim(dim: int, dtype: Any) -> int:
    """Return the items that a row of so many values takes in pages of a dtype; none take none."""
    return dim + SCALE_BYTES if dim and jnp.dtype(dtype) == CODED else dim


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
    return jnp.concatenate([jax.lax.bitcast_convert_type(values, jnp.uint8), tail], axis=-1)


def _power(exponent: Int[Array, "*lead"]) -> Float[Array, "*lead"]:
    """Return 2^(exponent - 127) in float32."""
    return jax.lax.bitcast_convert_type(exponent << _MANTISSA_BITS, jnp.float32)


def decoded(rows: Num[Array, "*lead items"]) -> Float[Array, "*lead dim"]:
    """Return rows of pages in float32."""
    if rows.dtype != CODED:
        return rows.astype(jnp.float32)
    values = jax.lax.bitcast_convert_type(rows[..., :-SCALE_BYTES], jnp.float8_e4m3fn)
    scales = jax.lax.bitcast_convert_type(rows[..., -SCALE_BYTES:], jnp.float32)
    return values.astype(jnp.float32) * scales[..., None]
