"""A dense map of many rows with what follows it in one launch: bias, gelu, and an addend."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lora_jax.ops.dispatch import ANY, COMPOSED, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.grouped_matmul.composed import plus
from lora_jax.ops.grouped_matmul.weights import QUANTISED, Matrix
from lora_jax.typing import Array, Float, Int

Matmul = Callable[..., Float[Array, "rows d_out"]]


def dense_op(matmul: Matmul) -> Op:
    """Return the op; where no kernel serves, it is composed of `matmul` and what follows."""

    def composed(
        x: Float[Array, "rows d_in"],
        w: Matrix,
        num_rows: Int[Array, ""],
        bias: Float[Array, "d_out"] | None,
        addend: Float[Array, "rows d_out"] | None,
        gelu: bool,
        *,
        named: str | None = None,
    ) -> Float[Array, "rows d_out"]:
        y = matmul(x, w, num_rows, bias, implementation=named)
        y = gelu_tanh(y) if gelu else y
        if addend is None:
            return y
        real = jnp.arange(x.shape[0], dtype=jnp.int32) < num_rows
        return jnp.where(real[:, None], plus(y, addend), y)

    kernel = backend_kernel("cuda", "dense_matmul")
    return Op(
        "dense_matmul",
        (
            Implementation("cuda", GPU, kernel, (_plain_weight,)),
            Implementation(COMPOSED, ANY, composed, hints=("named",), stands_in=True),
        ),
    )


def _plain_weight(x: Array, w: Matrix, *rest: object) -> str | None:
    return f"takes a plain weight, not {type(w).__name__}" if isinstance(w, QUANTISED) else None


def gelu_tanh(x: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return gelu by tanh, computed in float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
