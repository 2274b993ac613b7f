"""The order of 4-bit codes that a device's kernels read fastest."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.ops.grouped_matmul.weights import (
    FRAGMENT,
    FRAGMENTS,
    LANES,
    QUAD,
    QUADS,
    ROWS,
    CodedWeight,
    in_fragments,
    in_lanes,
    in_quads,
)

_ORDERS = {"gpu": FRAGMENTS, "cpu": LANES}  # of rows of whole fragments; elsewhere ROWS
_REORDER = {
    FRAGMENTS: jax.jit(in_fragments),
    LANES: jax.jit(in_lanes),
    QUADS: jax.jit(in_quads),
}


def order_of(codes_shape: tuple[int, ...], backend: str | None = None) -> str:
    """Return the order of codes that kernels of a backend, or of the default one, read fastest.

    `codes_shape` is that of one device. Rows of a part of a fragment stay in ROWS. QUADS is for
    CPUs whose kernels say so, and rows of whole quads.
    """
    if codes_shape[-1] % (FRAGMENT // 2):
        return ROWS
    order = _ORDERS.get(backend or jax.default_backend(), ROWS)
    if order == LANES and codes_shape[-1] % (QUAD // 2) == 0 and build.reads_quads():
        return QUADS
    return order


def for_kernels(w: Any, backend: str | None = None) -> Any:
    """Return a weight with its codes in the order of `order_of`; other weights as they are."""
    if not isinstance(w, CodedWeight) or w.order != ROWS:
        return w
    order = order_of(w.codes.sharding.shard_shape(w.codes.shape), backend)
    if order == ROWS:
        return w
    parts = [_REORDER[order](shard.data) for shard in w.codes.addressable_shards]
    codes = jax.make_array_from_single_device_arrays(w.codes.shape, w.codes.sharding, parts)
    return dataclasses.replace(w, codes=codes, order=order)


def put_in_order(codes: np.ndarray) -> None:
    """Reorder whole rows of codes on the host, if this backend's kernels want that."""
    if (order := order_of(codes.shape)) != ROWS:
        codes[...] = np.asarray(_REORDER[order](jnp.asarray(codes)))


def known_in_order(w: Any) -> Any:
    """Return a weight whose codes `put_in_order` has seen, as such; others as they are."""
    if not isinstance(w, CodedWeight):
        return w
    return dataclasses.replace(w, order=order_of(w.codes.shape))
