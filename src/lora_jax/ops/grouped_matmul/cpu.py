"""x times one matrix per group of rows, by the C++ kernel of ops/cpu/gemm.h."""

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.grouped_matmul.weights import (
    LANES,
    ROWS,
    CodedWeight,
    ScaledWeight,
    Weight,
    in_lanes,
)
from lora_jax.typing import Array, Float, Int

CODE_STEP, VALUE_STEP = 32, 16  # weights that the kernel decodes at a time


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Weight,
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference; a row's result depends on nothing but its x and its matrix."""
    build.require()
    bias = jnp.zeros((0, 0), x.dtype) if bias is None else bias
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    kind = x.dtype.name
    if isinstance(w, CodedWeight):
        if w.order not in (LANES, ROWS):
            raise Declined(f"takes codes in the orders {LANES} and {ROWS}, not {w.order}")
        if w.group_size % CODE_STEP:
            raise Declined(f"takes groups in multiples of {CODE_STEP} weights, not {w.group_size}")
        zeros = jnp.zeros((0, 0, 0), jnp.uint8) if w.zeros is None else w.zeros
        codes = w.codes if w.order == LANES else in_lanes(w.codes)  # at each call: a slow path
        call = jax.ffi.ffi_call(f"lora_jax_coded_gemm_{kind}", out)
        table = np.array(w.table, np.float32)
        return call(x, codes, w.scales, zeros, group_sizes, bias, table=table)
    if isinstance(w, ScaledWeight):
        (rows, cols), d_in = w.block, w.shape[2]
        if d_in % VALUE_STEP or (cols % VALUE_STEP and cols < d_in):
            raise Declined(
                f"takes d_in and blocks in multiples of {VALUE_STEP}, not {d_in} and {cols}"
            )
        call = jax.ffi.ffi_call(f"lora_jax_scaled_gemm_{kind}", out)
        block = {"block_rows": np.int64(rows), "block_cols": np.int64(cols)}
        return call(x, w.values, w.scales, group_sizes, bias, **block)
    return jax.ffi.ffi_call(f"lora_jax_gemm_{kind}", out)(x, w, group_sizes, bias)
