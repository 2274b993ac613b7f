"""Adds adapters row by row, in place on y, by the C++ kernel of ops/cpu/lora.h."""

import jax
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.typing import Array, Float


def lora_gemm(
    y: Float[Array, "rows d_out"],
    batch: LoraBatch,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference; a row's result depends on its own x, y and adapter only."""
    build.require()
    out = jax.ShapeDtypeStruct(y.shape, y.dtype)
    rows = "int8_" if batch.has_int8_rows else ""
    name = f"lora_jax_lora_{rows}{batch.x.dtype.name}"
    name += "" if y.dtype == batch.x.dtype else f"_to_{y.dtype.name}"
    call = jax.ffi.ffi_call(name, out, input_output_aliases={0: 0})
    tables = (batch.a_pool, batch.b_pool, batch.entries, batch.scaling)
    owners = (batch.row_to_slot, batch.row_to_expert)
    return call(y, batch.x, *tables, *owners, max_rank=np.int64(batch.max_rank))
