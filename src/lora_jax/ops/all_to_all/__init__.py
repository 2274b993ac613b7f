"""Gives each device of a mesh axis its part of all devices' columns or rows, in a `shard_map`."""

import jax
import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.all_to_all import reference
from lora_jax.ops.dispatch import ANY, GPU, Implementation, Op, backend_kernel
from lora_jax.typing import Array, Float, Int

__all__ = ["all_to_all", "all_to_all_owned", "all_to_all_rows"]

ALL_TO_ALL = Op(
    "all_to_all",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "all_to_all")),
        Implementation("xla", ANY, reference.all_to_all),
        Implementation("reference", ANY, reference.all_to_all),
    ),
)
ALL_TO_ALL_ROWS = Op(
    "all_to_all_rows",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "all_to_all_rows")),
        Implementation("xla", ANY, reference.all_to_all_rows),
        Implementation("reference", ANY, reference.all_to_all_rows),
    ),
)
ALL_TO_ALL_OWNED = Op(
    "all_to_all_owned",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "all_to_all_owned")),
        Implementation("xla", ANY, reference.all_to_all_owned),
        Implementation("reference", ANY, reference.all_to_all_owned),
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


def all_to_all_rows(
    x: Float[Array, "rows columns"],
    axis_name: str,
    *,
    group: int = 0,
    implementation: str | None = None,
) -> Float[Array, "own_rows all_columns"]:
    """y = [own rows of device 0 | own rows of device 1 | ...]: this one's rows, columns of all.

    Device number n has the n-th of equal parts of the rows. Values are copied.

    Args:
        x: this device's columns of all rows, float32 or bfloat16.
        axis_name: the mesh axis of the surrounding `shard_map`.
        group: as for `lora_jax.ops.all_gather`.
        implementation: name of one implementation; None takes the first that accepts.

    Raises:
        ValueError: x is not [rows, columns] with at least one row, or of another dtype, or its
            rows do not divide among the devices.
    """
    devices = jax.lax.axis_size(axis_name)
    if x.ndim != 2 or not x.shape[0] or x.shape[0] % devices:
        raise ValueError(
            f"all_to_all_rows: x has shape {x.shape}, expected [rows >= 1, columns] with rows that "
            f"divide by {devices} devices"
        )
    checks.check_dtypes("all_to_all_rows", x=x)
    return ALL_TO_ALL_ROWS.call(implementation, x, axis_name, group)


def all_to_all_owned(
    x: Float[Array, "own_rows columns"],
    source: Int[Array, "rows"],
    owner: Int[Array, "rows"],
    axis_name: str,
    *,
    group: int = 0,
    implementation: str | None = None,
) -> Float[Array, "rows part"]:
    """y[r] = this device's part of the columns of row source[r] that device owner[r] has.

    Each value leaves its owner once, so half the rows travel that `all_to_all` of all would send.

    Args:
        x: rows of this device, float32 or bfloat16. Device number n gets the n-th of equal parts
            of their columns.
        source: int32, where a row of the result stands in its owner's x; of rows that this device
            does not own, any row of x.
        owner: int32, the device that has it; the same on every device.
        axis_name: the mesh axis of the surrounding `shard_map`.
        group: as for `lora_jax.ops.all_gather`.
        implementation: name of one implementation; None takes the first that accepts.

    Raises:
        ValueError: x is not [own_rows >= 1, columns], or of another dtype, or its columns do not
            divide among the devices, or source and owner are not int32 and of one length.
    """
    devices = jax.lax.axis_size(axis_name)
    if x.ndim != 2 or not x.shape[0] or x.shape[1] % devices:
        raise ValueError(
            f"all_to_all_owned: x has shape {x.shape}, expected [own_rows >= 1, columns] with "
            f"columns that divide by {devices} devices"
        )
    if source.shape != owner.shape or source.ndim != 1:
        raise ValueError(
            f"all_to_all_owned: source {source.shape} and owner {owner.shape} are not of one length"
        )
    checks.check_dtypes("all_to_all_owned", x=x)
    checks.check_dtype("all_to_all_owned", jnp.int32, source=source, owner=owner)
    return ALL_TO_ALL_OWNED.call(implementation, x, source, owner, axis_name, group)
