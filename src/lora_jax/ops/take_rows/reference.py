"""The meaning of `take_rows`, and its portable implementation."""

from lora_jax.typing import Array, Float, Int


def take_rows(
    x: Float[Array, "rows width"], row_to_row: Int[Array, "new_rows"], num_rows: Int[Array, ""]
) -> Float[Array, "new_rows width"]:
    """y[r] = x[row_to_row[r]]; callers do not read rows from num_rows on."""
    del num_rows
    return x[row_to_row]
