"""Adds adapters row by row, in place on y, by the C++ kernel of ops/cpu/lora.h."""

import jax
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.typing import Array, Float, Int


def lora_gemm(
    y: Float[Array, "rows d_out"],
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"],
    max_rank: int,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference; a row's result depends on its own x, y and adapter only."""
    build.require()
    out = jax.ShapeDtypeStruct(y.shape, y.dtype)
    name = f"lora_jax_lora_{x.dtype.name}"
    name += "" if y.dtype == x.dtype else f"_to_{y.dtype.name}"
    call = jax.ffi.ffi_call(name, out, input_output_aliases={0: 0})
    arrays = (y, x, a_pool, b_pool, entries, scaling, row_to_slot, row_to_expert)
    return call(*arrays, max_rank=np.int64(max_rank))
