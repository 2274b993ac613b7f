"""Maps of one x in one launch: q, k and v, gate and up of a dense MLP."""

from collections.abc import Callable, Sequence

from lora_jax.ops.dispatch import (
    ANY,
    COMPOSED,
    CPU,
    GPU,
    Implementation,
    Op,
    backend_kernel,
    lazy_kernel,
)
from lora_jax.ops.grouped_matmul import cpu
from lora_jax.ops.grouped_matmul.weights import Matrices
from lora_jax.typing import Array, Float, Int

Matmul = Callable[..., Float[Array, "rows d_out"]]


def joined_op(matmul: Matmul) -> Op:
    """Return the op; where no kernel serves, each map is a `matmul` of its own."""

    def each(
        x: Float[Array, "rows d_in"],
        weights: Matrices,
        num_rows: Int[Array, ""],
        biases: Sequence[Float[Array, "_"] | None],
        *,
        named: str | None = None,
    ) -> tuple[Float[Array, "rows _"], ...]:
        pairs = zip(weights, biases, strict=True)
        return tuple(matmul(x, w, num_rows, bias, implementation=named) for w, bias in pairs)

    kernel = lazy_kernel("lora_jax.ops.grouped_matmul.pallas_gpu", "joined_matmul")
    return Op(
        "joined_matmul",
        (
            Implementation("cuda", GPU, backend_kernel("cuda", "joined_matmul")),
            Implementation("pallas_gpu", GPU, kernel),
            Implementation("ffi", CPU, cpu.joined_matmul),
            Implementation(COMPOSED, ANY, each, hints=("named",), stands_in=True),
        ),
    )
