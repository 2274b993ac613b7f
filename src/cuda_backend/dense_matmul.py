"""A dense map of many rows with what follows it, by the Hopper kernel of csrc/dense_matmul."""

import jax
import jax.numpy as jnp

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int

STEP = 8  # of d_in and d_out: rows start at multiples of 16 bytes


def check_support(dtype: jnp.dtype, rows: int, d_out: int, d_in: int) -> None:
    """Raise Declined, saying why, for what the kernel does not serve."""
    if dtype != jnp.bfloat16:
        raise Declined(f"cuda dense_matmul takes bfloat16, not {dtype}")
    if d_in % STEP or d_out % STEP or not rows or not d_in or not d_out:
        raise Declined(
            f"cuda dense_matmul takes d_in and d_out in steps of {STEP}, not {rows} rows of "
            f"{d_in} and {d_out}"
        )


def dense_matmul(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "d_out d_in"],
    num_rows: Int[Array, ""],
    bias: Float[Array, "d_out"] | None,
    addend: Float[Array, "rows d_out"] | None,
    gelu: bool,
) -> Float[Array, "rows d_out"]:
    """Same result as lora_jax.ops.grouped_matmul.dense_matmul; a row's bits are its own."""
    rows, (d_out, d_in) = x.shape[0], w.shape
    check_support(x.dtype, rows, d_out, d_in)
    if addend is not None and addend.dtype != x.dtype:
        raise Declined(f"cuda dense_matmul takes an addend of {x.dtype}, not {addend.dtype}")
    ffi.require()
    none = jnp.zeros((0,), x.dtype)
    given = [none if array is None else array for array in (bias, addend)]
    call = jax.ffi.ffi_call(
        "lora_jax_cuda_dense_matmul", jax.ShapeDtypeStruct((rows, d_out), x.dtype)
    )
    return call(x, w, num_rows.reshape(1), *given, gelu=gelu)
