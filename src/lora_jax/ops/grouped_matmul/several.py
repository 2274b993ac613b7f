"""Several maps of one x in one launch: q, k and v of a few rows, gate and up."""

from collections.abc import Callable, Sequence

from lora_jax.ops.dispatch import ANY, GPU, Implementation, Op, lazy_kernel
from lora_jax.ops.grouped_matmul.weights import QUANTISED, Matrices
from lora_jax.typing import Array, Float, Int

Matmul = Callable[..., Float[Array, "rows d_out"]]


def several_op(matmul: Matmul) -> Op:
    """Return the op; where no kernel serves, each map is a `matmul` of its own."""

    def each(
        x: Float[Array, "rows d_in"],
        weights: Matrices,
        num_rows: Int[Array, ""],
        biases: Sequence[Float[Array, "_"] | None],
    ) -> tuple[Float[Array, "rows _"], ...]:
        pairs = zip(weights, biases, strict=True)
        return tuple(matmul(x, w, num_rows, bias) for w, bias in pairs)

    kernel = lazy_kernel("lora_jax.ops.grouped_matmul.pallas_gpu", "matmuls")
    return Op(
        "matmuls",
        (
            Implementation("pallas_gpu", GPU, kernel, (_plain_weights,)),
            Implementation("xla", ANY, each, stands_in=True),
        ),
    )


def _plain_weights(x: Array, weights: Matrices, *rest: object) -> str | None:
    kinds = sorted({type(w).__name__ for w in weights if isinstance(w, QUANTISED)})
    return f"takes plain weights, not {', '.join(kinds)}" if kinds else None
