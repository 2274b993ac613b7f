"""Joins the columns that the devices of a mesh axis hold, inside a `shard_map`."""

from lora_jax.ops import dispatch
from lora_jax.ops.all_gather import reference
from lora_jax.typing import Array, Float

__all__ = ["all_gather"]

_KERNELS = {
    "cuda": dispatch.backend("cuda", "all_gather"),
    "xla": reference.all_gather,
    "reference": reference.all_gather,
}


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
    dispatch.check_dtypes("all_gather", x=x)
    return dispatch.call(_KERNELS, implementation, x, axis_name, group)
