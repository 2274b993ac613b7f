"""The gated activation between the maps of an MLP, and with the two maps before it."""

from lora_jax.ops import checks
from lora_jax.ops.dispatch import ANY, CPU, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.grouped_matmul import composed
from lora_jax.ops.grouped_matmul.weights import Matrix
from lora_jax.ops.silu_times import cpu, reference
from lora_jax.ops.silu_times.gated_maps import gated_maps_op
from lora_jax.typing import Array, Float, Int

__all__ = ["gated_maps", "silu_of_experts", "silu_times"]


def _portable(
    gate: Float[Array, "rows width"],
    up: Float[Array, "rows width"],
    num_rows: Int[Array, ""],
) -> Float[Array, "rows width"]:
    """Return the op of all rows; those of padding, whose gate and up are 0, are 0."""
    del num_rows
    return composed.silu_times(gate, up)


SILU_TIMES = Op(
    "silu_times",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "silu_times")),
        Implementation("ffi", CPU, cpu.silu_times),
        Implementation("xla", ANY, _portable, stands_in=True),
        Implementation("reference", ANY, reference.silu_times),
    ),
)


def silu_times(
    gate: Float[Array, "rows width"],
    up: Float[Array, "rows width"],
    num_rows: Int[Array, ""],
    *,
    implementation: str | None = None,
) -> Float[Array, "rows width"]:
    """Return silu(gate) * up, computed in float32 and rounded once.

    Rows at or after num_rows, an int32, whose gate and up must be 0, are 0. Both are float32 or
    bfloat16. Raises ValueError where up has not gate's shape.
    """
    checks.check_shapes("silu_times", up=(tuple(up.shape), tuple(gate.shape)))
    return SILU_TIMES.call(implementation, gate, up, num_rows)


SILU_OF_EXPERTS = Op(
    "silu_of_experts",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "silu_times")),
        Implementation("xla", ANY, _portable, stands_in=True),
    ),
)


def silu_of_experts(
    gate: Float[Array, "rows width"],
    up: Float[Array, "rows width"],
    num_rows: Int[Array, ""],
    *,
    implementation: str | None = None,
) -> Float[Array, "rows width"]:
    """Return what `silu_times` does, with the bits of `gated_matmul` on this platform.

    For experts whose two products are changed before they meet, as a LoRA Server changes them.
    Raises ValueError where up has not gate's shape.
    """
    checks.check_shapes("silu_of_experts", up=(tuple(up.shape), tuple(gate.shape)))
    return SILU_OF_EXPERTS.call(implementation, gate, up, num_rows)


GATED_MAPS = gated_maps_op(silu_times)


def gated_maps(
    x: Float[Array, "rows d_in"],
    w_gate: Matrix,
    w_up: Matrix,
    num_rows: Int[Array, ""],
    *,
    implementation: str | None = None,
) -> Float[Array, "rows width"]:
    """Return `silu_times` of x's maps by w_gate and w_up, which are [width, d_in]: the same bits.

    Raises ValueError naming a weight of another rank, or both where their shapes differ.
    """
    for name, w in (("w_gate", w_gate), ("w_up", w_up)):
        if w.ndim != 2 or w.shape != w_gate.shape:
            raise ValueError(
                f"gated_maps: {name} {tuple(w.shape)} must be rank 2, and as w_gate "
                f"{tuple(w_gate.shape)}"
            )
    return GATED_MAPS.call(implementation, x, w_gate, w_up, num_rows)
