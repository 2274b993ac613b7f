"""Mesh axes, and which axis of a weight lies on which of them.

The only file that spells "ep", "pp" and "tp": everything else names the logical axes of a weight.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

MESH_AXES = ("pp", "ep", "tp")

# Axes that are summed over in a product stay whole unless their producer is split the same way:
# "heads" and "mlp" are the outputs of one linear map and the inputs of the next.
LOGICAL_AXES: dict[str | None, str | None] = {
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    "experts": "ep",
    "embed": None,
    "latent": None,
    None: None,
}


def make_mesh(
    *, pp: int = 1, ep: int = 1, tp: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Return an explicit mesh of pp * ep * tp devices, by default the first ones there are.

    Raises:
        ValueError: fewer devices than the axes ask for.
    """
    devices = jax.devices() if devices is None else devices
    wanted = pp * ep * tp
    if len(devices) < wanted:
        raise ValueError(
            f"A mesh of pp {pp} x ep {ep} x tp {tp} needs {wanted} devices, "
            f"there are {len(devices)}."
        )
    types = (AxisType.Explicit,) * len(MESH_AXES)
    return jax.make_mesh((pp, ep, tp), MESH_AXES, axis_types=types, devices=devices[:wanted])


def weight_sharding(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | None
) -> jax.sharding.Sharding:
    """Return where a weight with these logical axes lies; without a mesh, on the first device.

    Raises:
        ValueError: an axis is unknown, or its size does not divide among its devices.
    """
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    if len(axes) != len(shape):
        raise ValueError(f"Logical axes {axes} do not fit shape {shape}.")
    for axis, size in zip(axes, shape, strict=True):
        if axis not in LOGICAL_AXES:
            raise ValueError(f"Logical axis {axis!r} of shape {shape} is not in the table.")
        parts = mesh.shape.get(LOGICAL_AXES[axis], 1)
        if size % parts:
            raise ValueError(f"Axis {axis!r} of size {size} does not divide among {parts} devices.")
    return NamedSharding(mesh, PartitionSpec(*(LOGICAL_AXES[axis] for axis in axes)))
