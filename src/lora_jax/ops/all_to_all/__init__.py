"""Gives each device of a mesh axis its part of all devices' columns, inside a `shard_map`."""

import jax

from lora_jax.ops import checks
from lora_jax.ops.all_to_all import reference
from lora_jax.ops.dispatch import ANY, GPU, Implementation, Op, backend_kernel
from lora_jax.typing import Array, Float

__all__ = ["all_to_all"]

ALL_TO_ALL = Op(
    "all_to_all",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "all_to_all")),
        Implementation("xla", ANY, reference.all_to_all),
        Implementation("reference", ANY, reference.all_to_all),
    ),
)


def all_to_all(
    x: Float[Array, "rows columns"],
    axis_name: str,
    *,
    group: int = 0,
    implementation: str | None = None,
) -> Float[Array, "rows columns"]:
    """y = [part of device 0 | part of device 1 | ...]: each device's columns that are this one's.

    Device number n has the n-th of equal parts of the columns. Values are copied.

    Args:
        x: this device's columns, float32 or bfloat16.
        axis_name: the mesh axis of the surrounding `shard_map`.
        group: as for `lora_jax.ops.all_gather`.
        implementation: name of one implementation; None takes the first that accepts.

    Raises:
        ValueError: x is not [rows, columns] with at least one row, or of another dtype, or its
            columns do not divide among the devices.
    """
    devices = jax.lax.axis_size(axis_name)
    if x.ndim != 2 or not x.shape[0] or x.shape[1] % devices:
        raise ValueError(
            f"all_to_all: x has shape {x.shape}, expected [rows >= 1, columns] with columns that "
            f"divide by {devices} devices"
        )
    checks.check_dtypes("all_to_all", x=x)
    return ALL_TO_ALL.call(implementation, x, axis_name, group)
