"""silu(gate) * up by the C++ kernel of ops/cpu/silu.h."""

import jax
import jax.numpy as jnp

from lora_jax.ops.cpu import build
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int


def silu_times(
    gate: Float[Array, "rows width"],
    up: Float[Array, "rows width"],
    num_rows: Int[Array, ""],
) -> Float[Array, "rows width"]:
    """Same result as the reference; padding rows cost nothing."""
    build.require()
    if {str(gate.dtype), str(up.dtype)} not in ({"float32"}, {"bfloat16"}):
        raise Declined(f"takes both in float32 or bfloat16, not {gate.dtype} and {up.dtype}")
    out = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    call = jax.ffi.ffi_call(f"lora_jax_silu_times_{gate.dtype.name}", out)
    return jnp.asarray(call(gate, up, num_rows.reshape(1)))
