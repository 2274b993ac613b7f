"""Linear maps of the CUDA backend: float32 matrices, bfloat16 rows in groups of few, and batches.

Prompts' products in bfloat16 are Mosaic's (`lora_jax.ops.grouped_matmul.pallas_gpu`), which has the
same order of sums: a row has the same bits by either. A row's result depends on nothing but its own
x and matrix.
"""

import jax
import jax.numpy as jnp

from cuda_backend import dense_rows, few_rows, ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.grouped_matmul import QUANTISED, composed
from lora_jax.ops.grouped_matmul.weights import Matrix, Weight
from lora_jax.typing import Array, Float, Int

VECTOR = 4  # values of d_in that are read at once
MAX_TILES = 2**31 - 1  # of 4 rows x 4 columns, in a launch


def check_support(dtype: jnp.dtype, rows: int, d_out: int, d_in: int) -> None:
    """Raise Declined, saying why, for what the kernels of float32 weights do not serve."""
    if dtype != jnp.float32:
        raise Declined(f"cuda grouped_matmul takes float32, not {dtype}")
    if rows < 1 or d_out < 1 or -(-rows // 4) * -(-d_out // 4) > MAX_TILES:
        raise Declined(
            f"cuda grouped_matmul takes 1 to {MAX_TILES} tiles of 4 rows by 4 columns, not {rows} "
            f"rows by {d_out}"
        )
    if d_in % VECTOR or d_in == 0:
        raise Declined(f"cuda grouped_matmul takes d_in in steps of {VECTOR}, not {d_in}")


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Weight,
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
    addend: Float[Array, "rows d_out"] | None = None,
    *,
    likely_groups: int | None = None,
) -> Float[Array, "rows d_out"]:
    """Same result as lora_jax.ops.grouped_matmul."""
    if w.dtype == jnp.bfloat16:
        return _products(x, (w,), (bias,), (addend,), group_sizes, likely_groups)[0]
    return composed.grouped_matmul(in_float32, x, w, group_sizes, bias, addend)


def gated_matmul(
    x: Float[Array, "rows d_in"],
    w_gate: Weight,
    w_up: Weight,
    group_sizes: Int[Array, "groups"],
    gate_addend: Float[Array, "rows d_out"] | None = None,
    up_addend: Float[Array, "rows d_out"] | None = None,
    *,
    likely_groups: int | None = None,
) -> Float[Array, "rows d_out"]:
    """Same result as lora_jax.ops.gated_matmul."""
    if x.dtype == jnp.bfloat16:
        pair, addends = (w_gate, w_up), (gate_addend, up_addend)
        return few_rows.gated_product(x, pair, addends, group_sizes, likely_groups)
    return composed.gated_matmul(in_float32, x, w_gate, w_up, group_sizes, gate_addend, up_addend)


def joined_matmul(
    x: Float[Array, "rows d_in"],
    ws: tuple[Matrix, ...],
    num_rows: Int[Array, ""],
    biases: tuple[Float[Array, "d_out"] | None, ...],
) -> tuple[Float[Array, "rows _"], ...]:
    """Same result as lora_jax.ops.grouped_matmul.joined_matmul, by one launch."""
    if x.dtype != jnp.bfloat16:
        raise Declined(f"cuda joined_matmul takes bfloat16, not {x.dtype}")
    weights = tuple(w[None] for w in ws)
    added = tuple(None if bias is None else bias[None] for bias in biases)
    none = (None,) * len(ws)
    return _products(x, weights, added, none, num_rows.reshape(1), None)


def _products(
    x: Float[Array, "rows d_in"],
    weights: tuple[Weight, ...],
    biases: tuple[Float[Array, "groups d_out"] | None, ...],
    addends: tuple[Float[Array, "rows d_out"] | None, ...],
    group_sizes: Int[Array, "groups"],
    likely_groups: int | None,
) -> tuple[Float[Array, "rows _"], ...]:
    """Return products of bfloat16 rows by the kernel that is made for so many of them."""
    plain = not any(isinstance(w, QUANTISED) for w in weights)
    if plain and weights[0].shape[0] == 1 and x.shape[0] > few_rows.PLAIN_ROWS:
        return dense_rows.products(x, weights, biases, addends[0], group_sizes)
    return few_rows.products(x, weights, biases, addends, group_sizes, likely_groups)


def in_float32(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_out d_in"],
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
) -> Float[Array, "rows d_out"]:
    """y[t] = w[g] @ x[t] + bias[g] in float32, w plain, x float32 or bfloat16.

    A row has the same bits whatever the number of rows. One group of bfloat16 rows, as a router
    has, is multiplied by tensor cores where d_in is a multiple of 32 (csrc f32_parts.cuh): the sums
    have another order than those of the same x in float32. All other x have one order.
    """
    if isinstance(w, QUANTISED):
        raise Declined(
            f"cuda grouped_matmul in float32 takes plain weights, not {type(w).__name__}"
        )
    rows, (_, d_out, d_in) = x.shape[0], w.shape
    check_support(w.dtype, rows, d_out, d_in)
    ffi.require()
    call = jax.ffi.ffi_call(
        "lora_jax_cuda_grouped_f32", jax.ShapeDtypeStruct((rows, d_out), w.dtype)
    )
    return call(x, w, group_sizes, jnp.zeros((0,), w.dtype) if bias is None else bias)
