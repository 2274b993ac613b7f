"""The RMS norm by the C++ kernel of ops/cpu/norm.h."""

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int


def add_rms_norm(
    x: Float[Array, "rows size"],
    addend: Float[Array, "rows size"] | None,
    weight: Float[Array, "size"],
    eps: float,
    *,
    num_rows: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """Same result as the reference; a row's result depends on the row alone.

    Rows at or after num_rows are not read, and 0 in both results.
    """
    build.require()
    dtypes = {str(a.dtype) for a in (x, addend, weight) if a is not None}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        raise Declined(f"takes all arrays in float32 or bfloat16, not {', '.join(sorted(dtypes))}")
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(
        f"lora_jax_rms_norm_{x.dtype.name}", [out] if addend is None else [out, out]
    )
    given = jnp.zeros((0, 0), x.dtype) if addend is None else addend
    count = jnp.full(1, x.shape[0], jnp.int32) if num_rows is None else num_rows.reshape(1)
    normed, *total = call(x, given, weight, count, eps=np.float32(eps))
    return total[0] if total else x, normed
