"""The meaning of all-to-all, and its implementation where devices have no kernel of their own."""

import jax
import jax.numpy as jnp

from lora_jax.typing import Array, Float, Int


def all_to_all(
    x: Float[Array, "rows columns"], axis_name: str, group: int
) -> Float[Array, "rows columns"]:
    """y[:, d * part + c] = x_d[:, own * part + c], x_d the x of device d; `group` is not used.

    `own` is the index of the device that computes y; part = columns / devices.
    """
    return jax.lax.all_to_all(x, axis_name, split_axis=1, concat_axis=1, tiled=True)


def all_to_all_rows(
    x: Float[Array, "rows columns"], axis_name: str, group: int
) -> Float[Array, "own_rows all_columns"]:
    """y[r, d * columns + c] = x_d[own * own_rows + r, c]; `x_d`, `own` and `group` as above."""
    return jax.lax.all_to_all(x, axis_name, split_axis=0, concat_axis=1, tiled=True)


def all_to_all_owned(
    x: Float[Array, "own_rows columns"],
    source: Int[Array, "rows"],
    owner: Int[Array, "rows"],
    axis_name: str,
    group: int,
) -> Float[Array, "rows part"]:
    """y[r, c] = x_d[source_d[r], own * part + c], d = owner[r]; `source_d` is device d's `source`.

    `x_d`, `own`, `part` and `group` are as in `all_to_all`.
    """
    devices = jax.lax.axis_size(axis_name)
    by_device = all_to_all(x[source], axis_name, group).reshape(source.shape[0], devices, -1)
    return jnp.take_along_axis(by_device, owner[:, None, None], axis=1)[:, 0]
