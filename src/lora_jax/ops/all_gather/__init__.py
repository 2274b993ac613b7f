"""Joins the columns that the devices of a mesh axis hold, inside a `shard_map`."""

import logging
from typing import Protocol, runtime_checkable

import jax

from lora_jax.ops import checks
from lora_jax.ops.all_gather import reference
from lora_jax.ops.dispatch import ANY, GPU, Implementation, Op, backend_kernel
from lora_jax.typing import Array, Float

__all__ = ["Group", "all_gather", "open_group"]

log = logging.getLogger(__name__)

ALL_GATHER = Op(
    "all_gather",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "all_gather")),
        Implementation("xla", ANY, reference.all_gather),
        Implementation("reference", ANY, reference.all_gather),
    ),
)


@runtime_checkable
class Group(Protocol):
    """Devices of this process joined for `all_gather`, which names them by `number`."""

    number: int

    def check(self) -> None:
        """Raise RuntimeError if a device has waited in vain for another: results are not valid."""
        ...


def open_group(devices: int) -> Group | None:
    """Return a group over the first devices of this process.

    None where nothing is faster than `jax.lax.all_gather`, or cannot be had; a log line says why.
    """
    if jax.default_backend() != "gpu":
        return None
    try:
        return backend_kernel("cuda", "gather_group")(devices)
    except (NotImplementedError, ValueError, OSError) as reason:
        log.warning("Devices exchange by jax.lax.all_gather, which is slower: %s", reason)
        return None


def all_gather(
    x: Float[Array, "rows columns"],
    axis_name: str,
    *,
    group: int = 0,
    implementation: str | None = None,
) -> Float[Array, "rows all_columns"]:
    """y = [x of device 0 | x of device 1 | ...]: the columns of every device, in mesh order.

    Values are copied, so the result has the same bits on every device and for every size.

    Args:
        x: this device's columns, float32 or bfloat16.
        axis_name: the mesh axis of the surrounding `shard_map`.
        group: number of a `cuda_backend.all_gather.GatherGroup` over the same devices; 0 uses
            `jax.lax.all_gather`.
        implementation: name of one implementation; None takes the first that accepts.

    Raises:
        ValueError: x is not [rows, columns] with at least one row, or of another dtype.
    """
    if x.ndim != 2 or not x.shape[0]:
        raise ValueError(f"all_gather: x has shape {x.shape}, expected [rows >= 1, columns]")
    checks.check_dtypes("all_gather", x=x)
    return ALL_GATHER.call(implementation, x, axis_name, group)
