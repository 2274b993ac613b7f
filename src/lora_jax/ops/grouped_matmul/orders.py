"""The order of 4-bit codes that a device's kernels read fastest."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.grouped_matmul.weights import FRAGMENT, FRAGMENTS, ROWS, CodedWeight, in_fragments

_reordered = jax.jit(in_fragments)


def order_of(codes_shape: tuple[int, ...], backend: str | None = None) -> str:
    """Return the order of codes that kernels of a backend, or of the default one, read fastest.

    `codes_shape` is that of one device. On a GPU whole rows of fragments are in FRAGMENTS.
    """
    whole = codes_shape[-1] % (FRAGMENT // 2) == 0
    return FRAGMENTS if (backend or jax.default_backend()) == "gpu" and whole else ROWS


def for_kernels(w: Any, backend: str | None = None) -> Any:
    """Return a weight with its codes in the order of `order_of`; other weights as they are."""
    if not isinstance(w, CodedWeight) or w.order != ROWS:
        return w
    if order_of(w.codes.sharding.shard_shape(w.codes.shape), backend) == ROWS:
        return w
    parts = [_reordered(shard.data) for shard in w.codes.addressable_shards]
    codes = jax.make_array_from_single_device_arrays(w.codes.shape, w.codes.sharding, parts)
    return dataclasses.replace(w, codes=codes, order=FRAGMENTS)


def put_in_order(codes: np.ndarray) -> None:
    """Reorder whole rows of codes on the host, if this backend's kernels want that."""
    if order_of(codes.shape) == FRAGMENTS:
        codes[...] = np.asarray(_reordered(jnp.asarray(codes)))


def known_in_order(w: Any) -> Any:
    """Return a weight whose codes `put_in_order` has seen, as such; others as they are."""
    if not isinstance(w, CodedWeight):
        return w
    return dataclasses.replace(w, order=order_of(w.codes.shape))
