"""Exchanges between the devices of a split, inside its shard_map; values are copied, never summed.

Without a split each of them returns its argument, so that one device's program has no trace of it.
"""

import jax
import jax.numpy as jnp

from lora_jax.ops.all_gather import all_gather
from lora_jax.ops.all_to_all import all_to_all
from lora_jax.sharding import AXIS, Split
from lora_jax.typing import Array, Float, Int

_UNIT = 4  # float32 values that kernels of a GPU exchange at once


def gather(x: Float[Array, "rows part"], split: Split | None) -> Float[Array, "rows whole"]:
    """Return the columns of all devices, side by side in the order of the mesh."""
    return x if split is None else all_gather(x, AXIS, group=split.group)


def gather_rows(x: Float[Array, "part width"], split: Split) -> Float[Array, "whole width"]:
    """Return the rows of all devices, one device's after the other's."""
    return gather(x.reshape(1, -1), split).reshape(-1, x.shape[1])


def pick(
    x: Float[Array, "rows width"], owner: Int[Array, "rows"], split: Split | None
) -> Float[Array, "rows width"]:
    """Return row t as device owner[t] has it."""
    if split is None:
        return x
    rows, width = x.shape
    everywhere = gather(x, split).reshape(rows, split.size, width)
    return jnp.take_along_axis(everywhere, owner[:, None, None], axis=1)[:, 0]


def swap(x: Float[Array, "rows width"], split: Split) -> Float[Array, "rows devices part"]:
    """Return this device's part of the columns of x, as each device has them."""
    swapped = all_to_all(x, AXIS, group=split.group)
    return swapped.reshape(x.shape[0], split.size, -1)


def worst_of_devices(statuses: Int[Array, "items"], split: Split | None) -> Int[Array, "items"]:
    """Return the largest of each status, small integers, that a device has."""
    if split is None:
        return statuses
    size = statuses.shape[0]
    padded = jnp.pad(statuses, (0, -size % _UNIT)).astype(jnp.float32)  # exact, and gathered as is
    everywhere = gather(padded[None], split).reshape(split.size, -1)
    return everywhere.max(axis=0)[:size].astype(jnp.int32)


def local_index(
    index: Int[Array, "*shape"], own: int
) -> tuple[Int[Array, "*shape"], Int[Array, "*shape"]]:
    """Return (owner, local) of an index into what is split `own` a device: -1 if not held here."""
    owner = index // own
    is_local = owner == jax.lax.axis_index(AXIS)
    return owner, jnp.where(is_local, index - owner * own, -1)
