"""Rows by index, by csrc/take_rows: the real ones alone, whole rows by a warp each."""

import jax

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int

UNIT = 16  # bytes that a thread moves at once


def take_rows(
    x: Float[Array, "rows width"], row_to_row: Int[Array, "new_rows"], num_rows: Int[Array, ""]
) -> Float[Array, "new_rows width"]:
    """Return what lora_jax.ops.take_rows does; rows from num_rows on are not written."""
    width = x.shape[1]
    if not width or width * x.dtype.itemsize % UNIT:
        raise Declined(
            f"cuda take_rows takes rows in units of {UNIT} bytes, not {width} x {x.dtype}"
        )
    ffi.require()
    result = jax.ShapeDtypeStruct((row_to_row.shape[0], width), x.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_take_rows", result)
    return call(x, row_to_row, num_rows.reshape(1))
