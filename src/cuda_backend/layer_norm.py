"""The layer norm of rows, by csrc/layer_norm; XLA makes six launches of it."""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float

VECTOR = 8  # values that are read at once
WIDEST_NORM = 2048  # a warp has a row


def check_norm(dtype: jnp.dtype, size: int) -> None:
    """Raise Declined, saying why, for rows that the norm does not serve."""
    if dtype != jnp.bfloat16:
        raise Declined(f"cuda layer_norm takes bfloat16, not {dtype}")
    if size % VECTOR or not 0 < size <= WIDEST_NORM:
        raise Declined(
            f"cuda layer_norm takes rows in steps of {VECTOR} up to {WIDEST_NORM}, not {size}"
        )


def layer_norm(
    x: Float[Array, "rows size"],
    weight: Float[Array, "size"],
    bias: Float[Array, "size"] | None,
    eps: float,
) -> Float[Array, "rows size"]:
    """Return the norm of each row; see lora_jax.ops.layer_norm."""
    for array in (x, weight):
        check_norm(array.dtype, x.shape[1])
    ffi.require()
    none = jnp.zeros((0,), x.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_layer_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, none if bias is None else bias, eps=np.float32(eps))
