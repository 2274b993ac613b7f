"""The layer norm of rows, in one kernel where a backend has one."""

import functools

import jax

from lora_jax.ops import checks
from lora_jax.ops.dispatch import ANY, CPU, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.layer_norm import cpu, reference, xla
from lora_jax.typing import Array, Float

__all__ = ["layer_norm"]

LAYER_NORM = Op(
    "layer_norm",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "layer_norm")),
        Implementation("ffi", CPU, cpu.layer_norm),
        Implementation("xla", ANY, xla.layer_norm, stands_in=True),
        Implementation("reference", ANY, reference.layer_norm),
    ),
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def layer_norm(
    x: Float[Array, "*rows size"],
    weight: Float[Array, "size"],
    bias: Float[Array, "size"] | None,
    eps: float,
    implementation: str | None = None,
) -> Float[Array, "*rows size"]:
    """Return (x - mean) / sqrt(variance + eps) * weight [+ bias] over the last axis.

    It is computed in float32 and rounded once; differentiable. `x` is float32 or bfloat16.

    Raises:
        ValueError: weight or bias is not as wide as x.
    """
    shape_of, wide = checks.shape_of, (x.shape[-1],)
    checks.check_shapes("layer_norm", weight=(shape_of(weight), wide), bias=(shape_of(bias), wide))
    flat = x.reshape(-1, x.shape[-1])
    return LAYER_NORM.call(implementation, flat, weight, bias, eps).reshape(x.shape)


@layer_norm.defjvp
def _layer_norm_jvp(eps, implementation, primals, tangents):
    def portable(x, weight, bias):
        return xla.layer_norm(x, weight, bias, eps)

    out = layer_norm(*primals, eps, implementation)
    return out, jax.jvp(portable, primals, tangents)[1]
