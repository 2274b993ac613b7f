"""The gated activation between the maps of an MLP, of the real rows alone on a CPU."""

from lora_jax.ops.dispatch import ANY, CPU, Implementation, Op
from lora_jax.ops.grouped_matmul import composed
from lora_jax.ops.silu_times import cpu, reference
from lora_jax.typing import Array, Float, Int

__all__ = ["silu_times"]


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

    Rows at or after num_rows, whose gate and up must be 0, are 0.
    """
    return SILU_TIMES.call(implementation, gate, up, num_rows)
