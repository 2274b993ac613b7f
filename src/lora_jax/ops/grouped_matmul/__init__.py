"""Linear maps: one matrix for all rows, or one per group of rows (MoE experts)."""

from lora_jax.ops import dispatch
from lora_jax.ops.grouped_matmul import cpu, reference, xla
from lora_jax.typing import Array, Float, Int

__all__ = ["grouped_matmul", "matmul"]

_KERNELS = {
    "cuda": dispatch.backend("cuda", "grouped_matmul"),
    "pallas_gpu": dispatch.late("lora_jax.ops.grouped_matmul.pallas_gpu", "grouped_matmul"),
    "pallas_tpu": dispatch.late("lora_jax.ops.grouped_matmul.pallas_tpu", "grouped_matmul"),
    "ffi": cpu.grouped_matmul,
    "xla": xla.grouped_matmul,
    "reference": reference.grouped_matmul,
}


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_out d_in"],
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """y[t] = w[g] @ x[t] + bias[g] for rows sorted by group; float32 sums, rounded once.

    Rows at or after sum(group_sizes) give exactly 0 and cost nothing.
    """
    if x.ndim != 2 or w.ndim != 3:
        raise ValueError(f"grouped_matmul: x {x.shape} must be rank 2 and w {w.shape} rank 3")
    groups, d_out, d_in = w.shape
    dispatch.check_dtypes("grouped_matmul", x=x, w=w, bias=bias)
    dispatch.check_shapes(
        "grouped_matmul",
        x=(tuple(x.shape), (x.shape[0], d_in)),
        group_sizes=(tuple(group_sizes.shape), (groups,)),
        bias=(dispatch.shape_of(bias), (groups, d_out)),
    )
    return dispatch.call(_KERNELS, implementation, x, w, group_sizes, bias)


def matmul(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "d_out d_in"],
    num_rows: Int[Array, ""],
    bias: Float[Array, "d_out"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """y[t] = w @ x[t] + bias for t < num_rows, exactly 0 for the rest, which cost nothing."""
    if w.ndim != 2:
        raise ValueError(f"matmul: w {w.shape} must be rank 2")
    return grouped_matmul(
        x,
        w[None],
        num_rows.reshape(1),
        None if bias is None else bias[None],
        implementation=implementation,
    )
