"""silu(gate) * up of two maps of one x: in one launch, where a kernel has the bits of the three."""

from collections.abc import Callable

from lora_jax.ops.dispatch import (
    ANY,
    COMPOSED,
    GPU,
    Declined,
    Implementation,
    Op,
    backend_kernel,
    lazy_kernel,
)
from lora_jax.ops.grouped_matmul import joined_matmul
from lora_jax.ops.grouped_matmul.weights import QUANTISED, Matrix
from lora_jax.typing import Array, Float, Int

SiluTimes = Callable[..., Float[Array, "rows width"]]


def gated_maps_op(silu_times: SiluTimes) -> Op:
    """Return the op; where no kernel serves, it is `joined_matmul` and `silu_times`.

    On a GPU the experts' kernels serve, with one group: what they compute behind the products has
    the bits of `silu_times` there, which a test on the device compares.
    """

    def of_one_group(kernel: Callable) -> Callable:
        def gated(
            x: Float[Array, "rows d_in"], w_gate: Matrix, w_up: Matrix, num_rows: Int[Array, ""]
        ) -> Float[Array, "rows width"]:
            return kernel(x, w_gate[None], w_up[None], num_rows.reshape(1))

        return gated

    def composed(
        x: Float[Array, "rows d_in"], w_gate: Matrix, w_up: Matrix, num_rows: Int[Array, ""]
    ) -> Float[Array, "rows width"]:
        return silu_times(*joined_matmul(x, (w_gate, w_up), num_rows, (None, None)), num_rows)

    cuda = backend_kernel("cuda", "gated_matmul")
    mosaic = lazy_kernel("lora_jax.ops.grouped_matmul.pallas_gpu", "gated_matmul")
    return Op(
        "gated_maps",
        (
            Implementation("cuda", GPU, of_one_group(cuda), (_plain_weights,)),
            Implementation("pallas_gpu", GPU, of_one_group(mosaic), (_plain_weights, _needs_silu)),
            Implementation(COMPOSED, ANY, composed, stands_in=True),
        ),
    )


def _plain_weights(x: Array, w_gate: Matrix, w_up: Matrix, num_rows: Array) -> str | None:
    """Return why the experts' kernels decline, or None.

    Their tiles are of few rows: of a dense layer's rows they would decode each weight many times.
    """
    kinds = {type(w).__name__ for w in (w_gate, w_up) if isinstance(w, QUANTISED)}
    return f"takes plain weights, not {', '.join(sorted(kinds))}" if kinds else None


def _needs_silu(*args: object) -> str | None:
    """Return why Mosaic's kernel declines where XLA computes silu alone, whose bits are others."""
    try:
        there = backend_kernel("cuda", "load_kernels")()
    except Declined:
        there = False
    return None if there else "silu alone would have other bits: CUDA's kernels are not there"
