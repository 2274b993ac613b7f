"""The RMS norm of rows, or of the sum of two, in one kernel where a backend has one."""

import functools

import jax

from lora_jax.ops import checks
from lora_jax.ops.dispatch import ANY, CPU, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.rms_norm import cpu, reference, xla
from lora_jax.typing import Array, Float, Int

__all__ = ["add_rms_norm", "rms_norm"]

RMS_NORM = Op(
    "rms_norm",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "rms_norm")),
        Implementation("ffi", CPU, cpu.add_rms_norm, hints=("num_rows",)),
        Implementation("xla", ANY, xla.add_rms_norm, stands_in=True),
        Implementation("reference", ANY, reference.add_rms_norm),
    ),
)


def add_rms_norm(
    x: Float[Array, "rows size"],
    addend: Float[Array, "rows size"] | None,
    weight: Float[Array, "size"],
    eps: float,
    *,
    num_rows: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """Return x + addend (x without one), and s / sqrt(mean(s^2) + eps) * weight of that sum s.

    The norm is computed in float32 and rounded once. Rows at or after num_rows, an int32, may be 0
    instead. `x` is float32 or bfloat16.

    Raises:
        ValueError: addend has not x's shape, or weight is not as wide as x.
    """
    checks.check_shapes(
        "rms_norm",
        addend=(checks.shape_of(addend), tuple(x.shape)),
        weight=(tuple(weight.shape), (x.shape[-1],)),
    )
    return RMS_NORM.call(implementation, x, addend, weight, eps, num_rows=num_rows)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*rows size"], weight: Float[Array, "size"], eps: float
) -> Float[Array, "*rows size"]:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis; differentiable.

    `x` is float32 or bfloat16. Raises ValueError where weight is not as wide as x.
    """
    flat = x.reshape(-1, x.shape[-1])
    return add_rms_norm(flat, None, weight, eps)[1].reshape(x.shape)


@rms_norm.defjvp
def _rms_norm_jvp(eps, primals, tangents):
    def portable(x, weight):
        return xla.add_rms_norm(x, None, weight, eps)[1]

    return rms_norm(*primals, eps), jax.jvp(portable, primals, tangents)[1]
