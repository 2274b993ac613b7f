"""x times one matrix per group of rows, or several of them, by the C++ kernel of ops/cpu/gemm.h."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.grouped_matmul.weights import (
    LANES,
    QUADS,
    ROWS,
    CodedWeight,
    Matrices,
    ScaledWeight,
    Weight,
    in_lanes,
)
from lora_jax.typing import Array, Float, Int

CODE_STEP, VALUE_STEP = 32, 16  # weights that the kernel decodes at a time
_PLAIN, _CODED, _SCALED, _QUAD_CODED = range(4)
_NO_TABLE = (0.0,) * 16


class _Form(NamedTuple):
    """A weight as the kernel takes it: its arrays, their form, and the values of codes."""

    arrays: tuple[Array, ...]
    facts: tuple[int, int, int]  # which of the forms, and the rows and columns of blocks
    table: tuple[float, ...] = _NO_TABLE


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Weight,
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference; a row's result depends on nothing but its x and its matrix."""
    return _products(x, (w,), group_sizes, (bias,))[0]


def joined_matmul(
    x: Float[Array, "rows d_in"],
    weights: Matrices,
    num_rows: Int[Array, ""],
    biases: Sequence[Float[Array, "_"] | None],
) -> tuple[Float[Array, "rows _"], ...]:
    """Return the product of x and each weight in one call, with the bits of calls of their own."""
    of_one = [None if bias is None else bias[None] for bias in biases]
    return _products(x, [w[None] for w in weights], num_rows.reshape(1), of_one)


def _products(
    x: Float[Array, "rows d_in"],
    weights: Sequence[Weight],
    group_sizes: Int[Array, "groups"],
    biases: Sequence[Float[Array, "groups _"] | None],
) -> tuple[Float[Array, "rows _"], ...]:
    build.require()
    forms = [_form(w) for w in weights]
    rest: list[Array] = []
    for form, bias in zip(forms, biases, strict=True):
        rest += [*form.arrays, jnp.zeros((0, 0), x.dtype) if bias is None else bias]
    outs = [jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype) for w in weights]
    facts = np.array([form.facts for form in forms], np.int64).ravel()
    tables = np.array([form.table for form in forms], np.float32).ravel()
    call = jax.ffi.ffi_call(f"lora_jax_gemm_{x.dtype.name}", outs)
    return tuple(call(x, group_sizes, *rest, facts=facts, tables=tables))


def _form(w: Weight) -> _Form:
    """Return what the kernel is given of a weight; raise Declined where it cannot read it."""
    if isinstance(w, CodedWeight):
        served = (LANES, ROWS, QUADS) if build.reads_quads() else (LANES, ROWS)
        if w.order not in served:
            raise Declined(f"takes codes in the orders {', '.join(served)}, not {w.order}")
        if w.group_size % CODE_STEP:
            raise Declined(f"takes groups in multiples of {CODE_STEP} weights, not {w.group_size}")
        zeros = jnp.zeros((0, 0, 0), jnp.uint8) if w.zeros is None else w.zeros
        codes = in_lanes(w.codes) if w.order == ROWS else w.codes  # at each call: a slow path
        form = _QUAD_CODED if w.order == QUADS else _CODED
        return _Form((codes, w.scales, zeros), (form, 0, 0), w.table)
    if isinstance(w, ScaledWeight):
        (rows, cols), d_in = w.block, w.shape[2]
        if d_in % VALUE_STEP or (cols % VALUE_STEP and cols < d_in):
            raise Declined(
                f"takes d_in and blocks in multiples of {VALUE_STEP}, not {d_in} and {cols}"
            )
        return _Form((w.values, w.scales), (_SCALED, rows, cols))
    return _Form((w,), (_PLAIN, 0, 0))
