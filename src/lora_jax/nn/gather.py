"""Exchanges between the devices of a split, inside its shard_map; values are copied, never summed.

Without a split each of them returns its argument, so that one device's program has no trace of it.
"""

import jax
import jax.numpy as jnp

from lora_jax.ops.all_gather import all_gather
from lora_jax.ops.all_to_all import all_to_all_owned, all_to_all_rows
from lora_jax.sharding import AXIS, Split
from lora_jax.typing import Array, Float, Int, Shaped

_UNIT = 4  # float32 values that kernels of a GPU exchange at once
SHARED_ROWS = 512  # from so many on, a share of a product's rows and an exchange take less time


def gather(x: Float[Array, "rows part"], split: Split | None) -> Float[Array, "rows whole"]:
    """Return the columns of all devices, side by side in the order of the mesh."""
    return x if split is None else all_gather(x, AXIS, group=split.group)


def gather_rows(x: Float[Array, "part width"], split: Split) -> Float[Array, "whole width"]:
    """Return the rows of all devices, one device's after the other's."""
    return gather(x.reshape(1, -1), split).reshape(-1, x.shape[1])


def shares_rows(rows: int, split: Split | None) -> bool:
    """Return whether each device takes a share of so many rows where its weight is whole."""
    return split is not None and rows >= SHARED_ROWS and rows % split.size == 0


def own_rows(x: Shaped[Array, "rows *shape"], split: Split) -> Shaped[Array, "share *shape"]:
    """Return the rows of x in this device's share, of equal shares in the order of the mesh."""
    num_own = x.shape[0] // split.size
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * num_own, num_own)


def num_own_rows(num_rows: Int[Array, ""], rows: int, split: Split) -> Int[Array, ""]:
    """Return how many of the first num_rows of `rows` are in this device's share."""
    num_own = rows // split.size
    return jnp.clip(num_rows - jax.lax.axis_index(AXIS) * num_own, 0, num_own)


def swap_rows(x: Float[Array, "rows part"], split: Split) -> Float[Array, "share whole"]:
    """Return the columns of all devices, side by side, of the rows in this device's share."""
    return all_to_all_rows(x, AXIS, group=split.group)


def pick(
    x: Float[Array, "rows width"], owner: Int[Array, "rows"], split: Split | None
) -> Float[Array, "rows width"]:
    """Return row t as device owner[t] has it."""
    if split is None:
        return x
    rows, width = x.shape
    everywhere = gather(x, split).reshape(rows, split.size, width)
    return jnp.take_along_axis(everywhere, owner[:, None, None], axis=1)[:, 0]


def take_owned(
    x: Float[Array, "own_rows width"],
    source: Int[Array, "rows"],
    owner: Int[Array, "rows"],
    split: Split,
) -> Float[Array, "rows part"]:
    """Return this device's part of the columns of row source[r] of device owner[r]."""
    return all_to_all_owned(x, source, owner, AXIS, group=split.group)


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
