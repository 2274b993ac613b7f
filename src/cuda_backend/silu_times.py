"""silu(gate) * up by csrc/silu_times: the bits of what kernels compute behind their products."""

import jax
import jax.numpy as jnp

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int

UNIT = 8  # values that a thread reads at once


def silu_times(
    gate: Float[Array, "rows width"], up: Float[Array, "rows width"], num_rows: Int[Array, ""]
) -> Float[Array, "rows width"]:
    """Return what lora_jax.ops.silu_times does, of bfloat16."""
    if {gate.dtype, up.dtype} != {jnp.dtype(jnp.bfloat16)}:
        raise Declined(f"cuda silu_times takes bfloat16, not {gate.dtype} and {up.dtype}")
    if not gate.size or gate.shape[1] % UNIT:
        raise Declined(f"cuda silu_times takes rows in steps of {UNIT}, not {gate.shape}")
    ffi.require()
    result = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    return jax.ffi.ffi_call("lora_jax_cuda_silu_times", result)(gate, up, num_rows.reshape(1))
