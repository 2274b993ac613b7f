"""x times one matrix per group of rows, by the C++ kernel of ops/cpu/gemm.h."""

import jax
import jax.numpy as jnp

from lora_jax.ops.cpu import build
from lora_jax.typing import Array, Float, Int


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_out d_in"],
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference; a row's result depends on nothing but its x and its matrix."""
    build.require()
    bias = jnp.zeros((0, 0), x.dtype) if bias is None else bias
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    call = jax.ffi.ffi_call(f"lora_jax_gemm_{x.dtype.name}", out)
    return call(x, w, group_sizes, bias)
