"""Checks of an exchange's arrays while it is traced."""

from collections.abc import Sequence

import jax.numpy as jnp

from lora_jax.typing import Array
from serving.lora_server.transport.base import PushRows
from serving.lora_server.transport.shapes import Shapes


def check_push(shapes: Shapes, site: int, x: Array, rows: PushRows) -> None:
    """Raise ValueError unless x and the map of its rows fit the site."""
    if not 0 <= site < len(shapes.sites):
        raise ValueError(f"site {site} is not one of {len(shapes.sites)}.")
    if x.dtype != shapes.row_dtype or x.ndim != 2 or x.shape[1] != shapes.sites[site].d_in:
        raise ValueError(
            f"site {shapes.sites[site].name} sends {shapes.dtype} [rows, "
            f"{shapes.sites[site].d_in}], got {x.dtype} {x.shape}."
        )
    if x.shape[0] > shapes.max_rows:
        raise ValueError(
            f"A batch has {x.shape[0]} rows and a landing slot {shapes.max_rows}; start both "
            "sides with more rows in a slot, or use a smaller batch."
        )
    for name in ("row_to_server", "row_to_adapter", "row_to_expert"):
        array = getattr(rows, name)
        if array.shape != x.shape[:1] or array.dtype != jnp.int32:
            raise ValueError(
                f"{name} must be int32 {x.shape[:1]}, got {array.dtype} {array.shape}."
            )


def check_outputs(shapes: Shapes, site: int, keep: Array, ys: Sequence[Array]) -> None:
    """Raise ValueError unless ys are what the site's results are added to."""
    want = [(keep.shape[0], width) for width in shapes.sites[site].d_outs]
    got = [tuple(y.shape) for y in ys]
    dtypes = {y.dtype for y in ys}
    if got != want:
        raise ValueError(f"site {shapes.sites[site].name} adds to {want}, got {got}.")
    if len(dtypes) != 1 or not dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        raise ValueError(f"ys must be all float32 or all bfloat16, got {sorted(map(str, dtypes))}.")
