"""The layer norm by the C++ kernel of ops/cpu/norm.h."""

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float


def layer_norm(
    x: Float[Array, "rows size"],
    weight: Float[Array, "size"],
    bias: Float[Array, "size"] | None,
    eps: float,
) -> Float[Array, "rows size"]:
    """Same result as the reference; a row's result depends on the row alone."""
    build.require()
    given = jnp.zeros((0,), x.dtype) if bias is None else bias
    dtypes = {str(a.dtype) for a in (x, weight, given)}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        raise Declined(f"takes all arrays in float32 or bfloat16, not {', '.join(sorted(dtypes))}")
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(f"lora_jax_layer_norm_{x.dtype.name}", out)
    return call(x, weight, given, eps=np.float32(eps))
