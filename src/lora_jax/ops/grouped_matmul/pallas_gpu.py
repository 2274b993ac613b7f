"""x times one matrix per group of rows on a Hopper GPU: a persistent Mosaic kernel.

Weights are wgmma's M operand and rows its N operand, so that a group of one row costs a tile of 8.
One warpgroup copies tiles into a ring of stages, ahead over the borders of work items; the others
multiply. Which group, rows and columns a CTA's next work is, it counts from group_sizes as it goes.

A row's result is one sum over d_in in steps of 16, whatever the tiles and its neighbours.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops import hopper, tuning_table
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.grouped_matmul._gpu_kernel import Operands, kernel_body
from lora_jax.ops.grouped_matmul._gpu_tiles import (
    ALIGN,
    QUANTISED_COLUMNS,
    STEP,
    STORED,
    GroupedMatmulConfig,
    depths,
    find_config,
    find_quantised,
    fitted,
    with_stages,
)
from lora_jax.ops.grouped_matmul._gpu_weights import Form, form_of, parts
from lora_jax.ops.grouped_matmul.weights import CodedWeight, Matrices, ScaledWeight, Weight
from lora_jax.ops.lowered_once import call_lowered
from lora_jax.typing import Array, Float, Int

MOST_SUMS = 160  # of a thread that a bias or addends are added to


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Weight,
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
    addend: Float[Array, "rows d_out"] | None = None,
    *,
    likely_groups: int | None = None,
    num_rows: Int[Array, ""] | None = None,
    num_added: Int[Array, "1"] | None = None,
    config: GroupedMatmulConfig | None = None,
    interpret: hopper.Interpret = None,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference; reads the matrices of groups that have rows, and only those.

    `interpret`: see hopper.require. Raises Declined for another machine or dtype, and
    for sizes that do not fill tiles. A single group is a dense layer: XLA's own matmul is faster at
    some sizes, but picks the order of a row's sums by the number of rows.
    """
    form = _require("grouped_matmul", x, (w,), interpret)
    addends = () if addend is None else (addend,)
    biased = bias is not None
    config = config or _find("grouped_matmul", x, w.shape, 1, addends, likely_groups, form, biased)
    arrays = x, (w,), group_sizes, num_rows, (bias,), addends, num_added if addends else None
    return _call(arrays, config, form.at(config.step), interpret)


def gated_matmul(
    x: Float[Array, "rows d_in"],
    w_gate: Weight,
    w_up: Weight,
    group_sizes: Int[Array, "groups"],
    gate_addend: Float[Array, "rows d_out"] | None = None,
    up_addend: Float[Array, "rows d_out"] | None = None,
    *,
    likely_groups: int | None = None,
    num_rows: Int[Array, ""] | None = None,
    num_added: Int[Array, "1"] | None = None,
    config: GroupedMatmulConfig | None = None,
    interpret: hopper.Interpret = None,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference in one launch: neither of the two products is written to memory.

    Raises Declined as grouped_matmul does, and for one addend without the other.
    """
    form = _require("gated_matmul", x, (w_gate, w_up), interpret)
    if (gate_addend is None) != (up_addend is None):
        raise Declined("gated_matmul on Mosaic GPU takes both addends or none")
    addends = () if gate_addend is None or up_addend is None else (gate_addend, up_addend)
    config = config or _find("gated_matmul", x, w_gate.shape, 2, addends, likely_groups, form)
    pair, biases = (w_gate, w_up), (None, None)
    arrays = x, pair, group_sizes, num_rows, biases, addends, num_added if addends else None
    return _call(arrays, config, form.at(config.step), interpret)


def joined_matmul(
    x: Float[Array, "rows d_in"],
    weights: Matrices,
    num_rows: Int[Array, ""],
    biases: Sequence[Float[Array, "_"] | None],
    *,
    config: GroupedMatmulConfig | None = None,
    interpret: hopper.Interpret = None,
) -> tuple[Float[Array, "rows _"], ...]:
    """Same results as the reference in one launch: k and v alone leave most of a GPU idle.

    Raises Declined as grouped_matmul does, and for quantised weights and biases.
    """
    if any(bias is not None for bias in biases):
        raise Declined("joined_matmul on Mosaic GPU takes no bias")
    several = tuple(w[None] for w in weights)
    forms = {_require("joined_matmul", x, (w,), interpret) for w in several}
    form = forms.pop()
    if forms or form.quantised:
        raise Declined("joined_matmul on Mosaic GPU takes plain weights")
    if config is None:  # as of one map with the tiles of all
        d_out = sum(w.shape[1] for w in several)
        config = _find("grouped_matmul", x, (1, d_out, x.shape[1]), 1, (), None, form)
    sizes, none = num_rows.reshape(1), (None,) * len(several)
    arrays = x, several, sizes, num_rows, none, (), None
    return _call(arrays, config, form.at(config.step), interpret, side_by_side=True)


def _find(
    op: str,
    x: Float[Array, "rows d_in"],
    sizes: tuple[int, ...],
    matrices: int,
    addends: tuple[Float[Array, "rows d_out"], ...],
    likely_groups: int | None,
    form: Form,
    biased: bool = False,
) -> GroupedMatmulConfig:
    """Return the tiles that were found best on this device at about this shape, or a guess.

    `sizes` are groups, d_out and d_in of each of the matrices.
    """
    rows, (groups, d_out, d_in) = x.shape[0], sizes
    groups = min(groups, likely_groups or groups)
    if form.quantised:
        config = guess = find_quantised(rows, groups, d_out, matrices, form.bits, form.step)
    else:
        shape = {"rows": rows, "groups": groups, "d_out": d_out, "d_in": d_in}
        found = tuning_table.find(op, shape, GroupedMatmulConfig)
        # How many rows a group has is not known here: one may have all of them.
        guess = fitted(find_config(rows, groups, d_out, matrices), rows, d_in, matrices)
        config = fitted(found, rows, d_in, matrices) if found else guess
    if not addends and not biased:
        return config
    return _beside(addends, config, matrices) or _beside(addends, guess, matrices) or guess


def _beside(
    addends: tuple[Array, ...], config: GroupedMatmulConfig, matrices: int
) -> GroupedMatmulConfig | None:
    """Return the tiles with registers and shared memory left to add to them, if there are any."""
    most = MOST_SUMS * 128 // (matrices * config.columns)
    config = dataclasses.replace(config, rows=min(config.rows, most), part=STORED)
    config = with_stages(config, matrices, addends[0].dtype.itemsize if addends else 0)
    return config if config.stages >= 2 else None


def _require(
    op: str,
    x: Float[Array, "rows d_in"],
    weights: tuple[Weight, ...],
    interpret: hopper.Interpret,
) -> Form:
    """Return the weights' form, or raise Declined, saying why, for what is not served."""
    hopper.require(op, x.dtype, interpret)
    form = form_of(op, *weights)
    rows, (groups, d_out, d_in) = x.shape[0], weights[0].shape
    if rows < 1 or groups < 1:
        raise Declined(
            f"{op} on Mosaic GPU takes at least 1 row and 1 group, not {rows} and {groups}"
        )
    if d_in % STEP or d_in == 0 or d_out % ALIGN or d_out == 0:
        raise Declined(
            f"{op} on Mosaic GPU takes d_in in steps of {STEP} and d_out in steps of {ALIGN}, "
            f"not {d_in} and {d_out}"
        )
    if form.quantised and d_out % QUANTISED_COLUMNS:
        raise Declined(
            f"{op} on Mosaic GPU takes d_out of quantised weights in steps of {QUANTISED_COLUMNS}, "
            f"not {d_out}"
        )
    # Results leave in swizzled blocks, of which the compiler wants whole ones.
    if not interpret and d_out > hopper.COLUMNS and d_out % hopper.COLUMNS:
        raise Declined(
            f"{op} on Mosaic GPU takes d_out above {hopper.COLUMNS} in steps of it, not {d_out}"
        )
    return form


def _call(
    arrays: tuple[Any, ...],
    config: GroupedMatmulConfig,
    form: Form,
    interpret: hopper.Interpret,
    *,
    side_by_side: bool = False,
) -> Any:
    """Return what `_launch` gives for these arrays; ValueError for a step that leaves a rest."""
    x, weights = arrays[:2]
    if x.shape[1] % form.step:
        raise ValueError(f"a config's step of {form.step} must divide d_in, which is {x.shape[1]}")
    results = [jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype) for w in weights]
    settings = config, form, interpret, hopper.num_sms(interpret), side_by_side
    return call_lowered(_launch, arrays, settings, tuple(results) if side_by_side else results[0])


# Equal launches of a program's layers are traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnames=("config", "form", "interpret", "sms", "side_by_side"))
def _launch(
    x: Float[Array, "rows d_in"],
    weights: tuple[Float[Array, "groups _ d_in"] | CodedWeight | ScaledWeight, ...],
    group_sizes: Int[Array, "groups"],
    num_rows: Int[Array, ""] | None,
    biases: tuple[Float[Array, "groups d_out"] | None, ...],
    addends: tuple[Float[Array, "rows d_out"], ...],
    num_added: Int[Array, "1"] | None,
    config: GroupedMatmulConfig,
    form: Form,
    interpret: hopper.Interpret,
    sms: int,
    side_by_side: bool = False,
) -> Float[Array, "rows d_out"] | tuple[Float[Array, "rows _"], ...]:
    """Return the product, or with two weights silu of the first product times the second.

    There are as many addends as weights, or none; `num_added` is 0 where nothing of them counts.
    Weights `side_by_side`, of plain numbers without biases and addends, give a product each. The
    kernel fills so many SMs.
    """
    rows, (groups, _, d_in) = x.shape[0], weights[0].shape
    matrices = 1 if side_by_side else len(weights)
    d_outs = tuple(w.shape[1] for w in (weights if side_by_side else weights[:1]))
    wide = config.columns * config.warpgroups
    # Biases are read in whole tiles, rows are copied eight at a time.
    pad = ((0, 0), (0, -d_outs[0] % wide))
    given = [jnp.pad(b, pad) for b in biases if b is not None]
    x, *added = (jnp.pad(a, ((0, -rows % ALIGN), (0, 0))) for a in (x, *addends))
    # Whole parts leave swizzled, which single rows cannot: they have a place of their own.
    part, warpgroups = (config.stored, config.columns), config.warpgroups
    waiting, addend_size = [], added[0].dtype.itemsize if added else 0
    deep = depths(config, matrices, addend_size)
    if added:
        shape = (warpgroups, deep.addends, matrices, *part)
        barriers = plgpu.Barrier(num_arrivals=matrices, num_barriers=warpgroups * deep.addends)
        waiting = [plgpu.SMEM(shape, added[0].dtype), barriers]
    values, *scales = zip(*(parts(w) for w in weights), strict=True)
    others = [array for arrays in scales for array in arrays]
    if interpret and form.quantised:
        waiting.append(plgpu.SMEM((matrices, wide, form.step), x.dtype))
    stages, ctas = config.stages, sms * config.ctas
    asked = () if num_added is None else (num_added,)
    counts = d_in, matrices, len(given), len(added)
    operands = Operands(len(x), groups, d_outs, *counts, jnp.dtype(x.dtype), form, bool(asked))
    kernel = plgpu.kernel(
        kernel_body(config, deep, operands, ctas, bool(interpret)),
        out_type=[jax.ShapeDtypeStruct((len(x), d_out), x.dtype) for d_out in d_outs],
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((matrices, stages, wide, form.stored_step), values[0].dtype),
            plgpu.SMEM((stages, config.rows, form.step), x.dtype),
            plgpu.SMEM((warpgroups, deep.results, *part), x.dtype),
            plgpu.SMEM((warpgroups, *part), x.dtype),
            plgpu.Barrier(num_arrivals=1 + matrices, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            *waiting,
        ],
        interpret=interpret or False,
    )
    last = jnp.asarray(rows if num_rows is None else num_rows, jnp.int32).reshape(1)
    ys = kernel(group_sizes, last, x, *values, *others, *given, *added, *asked)
    ys = tuple(y[:rows] for y in ys)
    return ys if side_by_side else ys[0]
