"""The RMS norm of rows, by csrc/rms_norm; XLA makes three launches of it."""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float

VECTOR = 8  # values that are read at once
WIDEST_NORM = 8192


def check_norm(dtype: jnp.dtype, size: int) -> None:
    """Raise Declined, saying why, for rows that the norm does not serve."""
    if dtype != jnp.bfloat16:
        raise Declined(f"cuda rms_norm takes bfloat16, not {dtype}")
    if size % VECTOR or not 0 < size <= WIDEST_NORM:
        raise Declined(
            f"cuda rms_norm takes rows in steps of {VECTOR} up to {WIDEST_NORM}, not {size}"
        )


def rms_norm(
    x: Float[Array, "rows size"],
    addend: Float[Array, "rows size"] | None,
    weight: Float[Array, "size"],
    eps: float,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """Return x + addend, or x, and its norm; see lora_jax.ops.rms_norm."""
    for array in (x, weight):
        check_norm(array.dtype, x.shape[1])
    ffi.require()
    none, whole = jnp.zeros((0,), x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)
    shapes = (jax.ShapeDtypeStruct((0,), x.dtype) if addend is None else whole, whole)
    call = jax.ffi.ffi_call("lora_jax_cuda_rms_norm", shapes)
    total, normed = call(x, none if addend is None else addend, weight, eps=np.float32(eps))
    return (x if addend is None else total), normed
