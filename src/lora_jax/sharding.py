"""Split of a model over several devices: which axis of a weight lies on which device.

The only file that spells the mesh axis: everything else names the logical axes of a weight. Every
linear map is split along its outputs or lies whole on each device, and experts are split by expert
or along their outputs too. So no product is a partial sum, and N devices give the bits of one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

AXIS = "device"
EXPERT_SPLITS = ("ep", "tp")
ATTENTION_OUTPUTS = ("parts", "whole")
UNIT = 64  # a GPU's kernels take outputs in steps of this

_OUTPUTS = ("vocab", "heads", "kv_heads", "mlp")  # split where they come first
_OF_ATTENTION = "attended"  # outputs of o: in parts, or whole where the split says so
_INPUTS = ("heads", "mlp")  # outputs of the map before: this map's own outputs are split
_WHOLE = ("embed", "latent", None)
_KNOWN = (*_OUTPUTS, *_WHOLE, _OF_ATTENTION, "experts")


@dataclasses.dataclass(frozen=True)
class Split:
    """One model over the devices of a mesh with the single axis AXIS; None stands for one device.

    `experts` is "ep" (each device has some experts whole) or "tp" (each has a part of the outputs
    of every expert). `attention_output` is "whole" where each device has all outputs of attention's
    last map, o, and "parts" where it has a part of them. `group` is the number of the devices'
    GatherGroup, or 0; `check` raises RuntimeError once a device of it has waited in vain for
    another: results are then not valid.
    """

    mesh: Mesh
    experts: str = "ep"
    group: int = 0
    check: Callable[[], None] = lambda: None
    attention_output: str = "parts"

    def __post_init__(self) -> None:
        if self.experts not in EXPERT_SPLITS:
            raise ValueError(f"experts are split by {EXPERT_SPLITS}, not {self.experts!r}")
        if (found := self.attention_output) not in ATTENTION_OUTPUTS:
            raise ValueError(f"attention_output is one of {ATTENTION_OUTPUTS}, not {found!r}")

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.mesh.size

    @property
    def vocab_multiple(self) -> int:
        """Rows of the vocabulary are padded to a multiple: equal parts, in units of a kernel."""
        return UNIT * self.size

    @property
    def whole(self) -> NamedSharding:
        """Sharding of what every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Sharding of what is the rows of all devices, one device's after the other's."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @property
    def heads(self) -> NamedSharding:
        """Sharding of pages [pages, page_size, kv_heads, dim] by head."""
        return NamedSharding(self.mesh, PartitionSpec(None, None, AXIS))

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Return how a weight with these logical axes is split; ValueError for an unknown axis."""
        for axis in axes:
            if axis not in _KNOWN:
                raise ValueError(f"Logical axis {axis!r} of {axes} is not in the table.")
        if self.has_whole(axes):
            return PartitionSpec()
        position = _split_axis(axes, self.experts)
        if position is None:
            return PartitionSpec()
        return PartitionSpec(*(AXIS if i == position else None for i in range(len(axes))))

    def has_whole(self, axes: tuple[str | None, ...]) -> bool:
        """Return whether these are the axes of attention's last map, or of its bias, kept whole."""
        return axes[0] == _OF_ATTENTION and self.attention_output == "whole"


def has_split_inputs(axes: tuple[str | None, ...]) -> bool:
    """Return whether a map's inputs are the split outputs of another one, to be gathered first."""
    return len(axes) == 2 and axes[0] in ("embed", _OF_ATTENTION) and axes[1] in _INPUTS


def _split_axis(axes: tuple[str | None, ...], experts: str) -> int | None:
    """Return the number of the axis that is split, None for a weight that stays whole."""
    if axes[0] == "experts":
        return 0 if experts == "ep" else 1
    first_is_split = axes[0] in (*_OUTPUTS, _OF_ATTENTION)
    if first_is_split or axes == ("embed",) or has_split_inputs(axes):
        return 0
    return None


def make_mesh(size: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh of `size` devices, by default the first ones there are.

    Raises:
        ValueError: there are fewer devices.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < size:
        raise ValueError(f"A model over {size} devices: there are {len(devices)}.")
    return jax.make_mesh((size,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:size])


def weight_sharding(
    axes: tuple[str | None, ...], shape: tuple[int, ...], split: Split | None
) -> jax.sharding.Sharding:
    """Return where a weight with these logical axes lies; without a split, on the first device.

    Raises:
        ValueError: an axis is unknown, or its size does not divide among the devices.
    """
    if split is None:
        return SingleDeviceSharding(jax.devices()[0])
    if len(axes) != len(shape):
        raise ValueError(f"Logical axes {axes} do not fit shape {shape}.")
    spec = split.spec(axes)
    for axis, size, current in zip(axes, shape, spec, strict=False):
        if current is not None and size % split.size:
            raise ValueError(
                f"Axis {axis!r} of size {size} does not divide among {split.size} devices."
            )
    return NamedSharding(split.mesh, spec)


def put(values: Any, sharding: jax.sharding.Sharding) -> Any:
    """Return a tree of the host's arrays where `sharding` says.

    On devices of several processes each gives the parts of its own: jax.device_put would compare
    the values among them all.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)

    def one(value: Any) -> jax.Array:
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, values)
