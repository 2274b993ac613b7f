"""Rows of a matrix by index, those that are real alone: the experts' rows of each device."""

import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.dispatch import ANY, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.take_rows import reference
from lora_jax.typing import Array, Float, Int

__all__ = ["take_rows"]

TAKE_ROWS = Op(
    "take_rows",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "take_rows")),
        Implementation("xla", ANY, reference.take_rows, stands_in=True),
        Implementation("reference", ANY, reference.take_rows),
    ),
)


def take_rows(
    x: Float[Array, "rows width"],
    row_to_row: Int[Array, "new_rows"],
    num_rows: Int[Array, ""],
    *,
    implementation: str | None = None,
) -> Float[Array, "new_rows width"]:
    """y[r] = x[row_to_row[r]] for r < num_rows; other rows may hold anything.

    Args:
        x: float32 or bfloat16.
        row_to_row: int32, rows of x.
        num_rows: int32, how many rows of the result are read by what follows.
        implementation: name of one implementation; None takes the first that accepts.

    Raises:
        ValueError: a shape or dtype is another one.
    """
    if x.ndim != 2 or row_to_row.ndim != 1 or num_rows.ndim != 0:
        raise ValueError(
            f"take_rows: x {x.shape} must be rank 2, row_to_row {row_to_row.shape} 1, num_rows "
            f"{num_rows.shape} 0"
        )
    checks.check_dtypes("take_rows", x=x)
    checks.check_dtype("take_rows", jnp.int32, row_to_row=row_to_row, num_rows=num_rows)
    return TAKE_ROWS.call(implementation, x, row_to_row, num_rows)
