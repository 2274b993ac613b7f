"""Linear maps: one matrix for all rows, or one per group of rows (MoE experts)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.dispatch import (
    ANY,
    CPU,
    GPU,
    TPU,
    Implementation,
    Op,
    backend_kernel,
    lazy_kernel,
)
from lora_jax.ops.grouped_matmul import composed, cpu, reference, xla
from lora_jax.ops.grouped_matmul.composed import plus, silu_times
from lora_jax.ops.grouped_matmul.dense import dense_op, gelu_tanh
from lora_jax.ops.grouped_matmul.joined import joined_op
from lora_jax.ops.grouped_matmul.weights import (
    QUANTISED,
    CodedWeight,
    Matrices,
    Matrix,
    ScaledWeight,
    Weight,
)
from lora_jax.typing import Array, Float, Int

__all__ = [
    "QUANTISED",
    "CodedWeight",
    "ScaledWeight",
    "dense_matmul",
    "gated_matmul",
    "gelu_tanh",
    "grouped_matmul",
    "joined_matmul",
    "matmul",
    "plus",
    "silu_times",
]

Given = Array | jax.ShapeDtypeStruct  # x, or its shape and dtype


def _plain_weights(*args: Any) -> str | None:
    """Return why a kernel for plain weights declines, or None."""
    kinds = {type(arg).__name__ for arg in args if isinstance(arg, QUANTISED)}
    return f"takes plain weights, not {', '.join(sorted(kinds))}" if kinds else None


def _widened(kernel: Callable) -> Callable:
    """Return a kernel of equal dtypes as one that takes x narrower than w too, and converts it."""

    def of_wide(x: Array, w: Weight, *rest: Any, **hints: Any) -> Array:
        return kernel(x.astype(w.dtype), w, *rest, **hints)

    return of_wide


def _op(name: str, around: Callable, around_xla: Callable) -> Op:
    """Return the op that is around(product, ...) of plain products; Pallas kernels fuse it.

    `around_xla` is the same of XLA's products, with the bits of the platform's kernels.
    """

    def composed_of(product: Callable) -> Callable:
        return _widened(functools.partial(around, product))

    few = _of_zeros(backend_kernel("cuda", name))
    fused_gpu = _widened(lazy_kernel(f"{__name__}.pallas_gpu", name))
    fused_tpu = _of_zeros(_widened(lazy_kernel(f"{__name__}.pallas_tpu", name)))
    plain, hints = (_plain_weights,), ("likely_groups", "num_rows", "num_added")
    all_read = functools.partial(Implementation, hints=("num_added",))
    by_xla = _widened(functools.partial(around_xla, xla.grouped_matmul))
    return Op(
        name,
        (
            Implementation("cuda", GPU, few, hints=("likely_groups", "num_added")),
            Implementation("pallas_gpu", GPU, fused_gpu, hints=hints),
            all_read("pallas_tpu", TPU, fused_tpu, accepts=plain),
            all_read("ffi", CPU, _of_zeros(composed_of(cpu.grouped_matmul))),
            all_read("xla", ANY, _of_zeros(by_xla)),
            all_read("reference", ANY, _of_zeros(composed_of(reference.grouped_matmul))),
        ),
    )


def _of_zeros(kernel: Callable) -> Callable:
    """Return a kernel of either op that takes `num_added`, of one that reads all addends."""

    @functools.wraps(kernel)
    def reads_zeros(*args: Any, num_added: Int[Array, "1"] | None = None, **hints: Any) -> Array:
        if num_added is None:
            return kernel(*args, **hints)
        operands, addends = args[:4], args[4:]
        given = (None if a is None else jnp.where(num_added[0] > 0, a, 0) for a in addends)
        return kernel(*operands, *given, **hints)

    return reads_zeros


GROUPED_MATMUL = _op("grouped_matmul", composed.grouped_matmul, composed.grouped_matmul)
GATED_MATMUL = _op("gated_matmul", composed.gated_matmul, composed.gated_by_platform)


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Weight,
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None = None,
    addend: Float[Array, "rows d_out"] | None = None,
    *,
    likely_groups: int | None = None,
    num_rows: Int[Array, ""] | None = None,
    num_added: Int[Array, "1"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """y[t] = w[g] @ x[t] + bias[g] for rows sorted by group; float32 sums, rounded once.

    x may be bfloat16 where w, and so bias and y, are float32: the bits are those of
    x.astype(float32), but where a GPU's tensor cores multiply rows of one group. With an addend, of
    y's dtype or float32, y[t] + addend[t] is summed in float32 and rounded once more: a row whose
    addend is 0 has the bits that it has without. Rows at or after sum(group_sizes) give exactly 0
    and cost nothing. `likely_groups` says how many groups tend to have rows, if not all, and
    `num_rows`, at least sum(group_sizes), behind which row no group is to be looked for: speed may
    depend on them, results do not. Where `num_added` is given and 0, all of the addend counts as 0,
    whatever it holds, and need not be read. A quantised w (`weights.py`) gives the bits of the
    array [groups, d_out, d_in] that it stands for.

    Raises:
        ValueError: a shape or dtype does not fit: x and w of equal widths, float32 or bfloat16,
            int32 sizes, one for each group.
    """
    wide = _as_wide(x, w)
    _check("grouped_matmul", wide, group_sizes, w=w)
    checks.check_dtypes("grouped_matmul", x=wide, bias=bias)
    biases = (checks.shape_of(bias), w.shape[:2])
    checks.check_shapes("grouped_matmul", bias=biases)
    _check_addends("grouped_matmul", wide, w, num_added, addend=addend)
    hints = {"likely_groups": likely_groups, "num_rows": num_rows, "num_added": num_added}
    return GROUPED_MATMUL.call(implementation, x, w, group_sizes, bias, addend, **hints)


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
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """silu(gate[t]) * up[t], both as grouped_matmul gives them, in float32 and rounded once."""
    op = "gated_matmul"
    _check(op, x, group_sizes, w_gate=w_gate, w_up=w_up)
    checks.check_shapes(op, w_up=(tuple(w_up.shape), tuple(w_gate.shape)))
    _check_addends(op, x, w_gate, num_added, gate_addend=gate_addend, up_addend=up_addend)
    arrays = (x, w_gate, w_up, group_sizes, gate_addend, up_addend)
    hints = {"likely_groups": likely_groups, "num_rows": num_rows, "num_added": num_added}
    return GATED_MATMUL.call(implementation, *arrays, **hints)


def matmul(
    x: Float[Array, "rows d_in"],
    w: Matrix,
    num_rows: Int[Array, ""],
    bias: Float[Array, "d_out"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """y[t] = w @ x[t] + bias for t < num_rows, exactly 0 for the other rows, which cost nothing.

    x may be bfloat16 where w is float32, as in `grouped_matmul`. A GPU's kernel for that case
    computes the other rows too.

    Raises:
        ValueError: a shape or dtype does not fit: x and w of equal widths, float32 or bfloat16, a
            bias of w's rows, an int32 num_rows.
    """
    if w.ndim != 2 or num_rows.ndim != 0:
        raise ValueError(f"matmul: w {w.shape} must be rank 2, num_rows {num_rows.shape} 0")
    return grouped_matmul(
        x,
        w[None],
        num_rows.reshape(1),
        None if bias is None else bias[None],
        implementation=implementation,
    )


DENSE_MATMUL = dense_op(matmul)
JOINED_MATMUL = joined_op(matmul)


def joined_matmul(
    x: Float[Array, "rows d_in"],
    weights: Matrices,
    num_rows: Int[Array, ""],
    biases: Sequence[Float[Array, "_"] | None],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows _"], ...]:
    """Return `matmul` of x and each weight with its bias: the same bits, in fewer launches.

    Raises ValueError as `matmul` does, and where there are not as many biases as weights.
    """
    if len(weights) == len(biases) == 1:
        return (matmul(x, weights[0], num_rows, biases[0], implementation=implementation),)
    if num_rows.ndim != 0 or len(weights) != len(biases):
        given = f"{len(weights)} weights, {len(biases)} biases"
        raise ValueError(f"joined_matmul: num_rows {num_rows.shape} must be rank 0; {given}")
    for number, w in enumerate(weights):
        if w.ndim != 2:
            raise ValueError(f"joined_matmul: weight {number} {w.shape} must be rank 2")
        _check("joined_matmul", x, num_rows.reshape(1), **{f"weight {number}": w[None]})
        name, bias = f"bias {number}", biases[number]
        checks.check_dtypes("joined_matmul", x=x, **{name: bias})
        checks.check_shapes("joined_matmul", **{name: (checks.shape_of(bias), w.shape[:1])})
    given = x, tuple(weights), num_rows, tuple(biases)
    return JOINED_MATMUL.call(implementation, *given, named=implementation)


def dense_matmul(
    x: Float[Array, "rows d_in"],
    w: Matrix,
    num_rows: Int[Array, ""],
    bias: Float[Array, "d_out"] | None = None,
    addend: Float[Array, "rows d_out"] | None = None,
    *,
    gelu: bool = False,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """y[t] = f(w @ x[t] + bias) + addend[t] for t < num_rows, exactly 0 for the rest.

    f is gelu by tanh, or nothing; the map, f and the sum are rounded one after the other. It is
    made for many rows and plain weights: `matmul` serves few rows.

    Raises:
        ValueError: a shape or dtype does not fit, as in `matmul`; addend has not y's shape.
    """
    if w.ndim != 2 or num_rows.ndim != 0:
        raise ValueError(f"dense_matmul: w {w.shape} must be rank 2, num_rows {num_rows.shape} 0")
    _check("dense_matmul", x, num_rows.reshape(1), w=w[None])
    checks.check_dtypes("dense_matmul", x=x, bias=bias)
    checks.check_shapes("dense_matmul", bias=(checks.shape_of(bias), w.shape[:1]))
    _check_addends("dense_matmul", x, w[None], None, addend=addend)
    given = x, w, num_rows, bias, addend, gelu
    return DENSE_MATMUL.call(implementation, *given, named=implementation)


def _as_wide(x: Array, w: Weight) -> Given:
    """Return x, or where it is bfloat16 and w float32 the shape of its float32 values."""
    narrow = x.dtype == jnp.bfloat16 and w.dtype == jnp.float32
    return jax.ShapeDtypeStruct(x.shape, w.dtype) if narrow else x


def _check(op: str, x: Given, group_sizes: Array, **weights: Weight) -> None:
    """Raise ValueError naming what has a wrong shape or dtype."""
    for name, w in weights.items():
        if isinstance(w, QUANTISED):
            w.check(f"{op}: {name}")
        if x.ndim != 2 or w.ndim != 3:
            raise ValueError(f"{op}: x {x.shape} must be rank 2 and {name} {w.shape} rank 3")
        checks.check_shapes(
            op,
            x=(tuple(x.shape), (x.shape[0], w.shape[2])),
            group_sizes=(tuple(group_sizes.shape), (w.shape[0],)),
        )
    checks.check_dtypes(op, x=x, **weights)
    checks.check_dtype(op, jnp.int32, group_sizes=group_sizes)


def _check_addends(
    op: str, x: Given, w: Weight, num_added: Array | None, **addends: Array | None
) -> None:
    """Raise ValueError naming an addend, or their number, that has a wrong shape or dtype."""
    if num_added is not None:
        checks.check_shapes(op, num_added=(tuple(num_added.shape), (1,)))
        checks.check_dtype(op, jnp.int32, num_added=num_added)
    given = {name: a for name, a in addends.items() if a is not None}
    shape = (x.shape[0], w.shape[1])
    checks.check_shapes(op, **{name: (tuple(a.shape), shape) for name, a in given.items()})
    dtypes = {name: a.dtype for name, a in given.items()}
    if len({*dtypes.values()}) > 1 or any(d not in (x.dtype, jnp.float32) for d in dtypes.values()):
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        allowed = " or all ".join(sorted({str(x.dtype), "float32"}))
        raise ValueError(f"{op}: addends must all be {allowed}, got {listed}")
