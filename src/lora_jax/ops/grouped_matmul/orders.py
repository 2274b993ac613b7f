"""The order of 4-bit codes that a device's kernels read fastest."""

import dataclasses
from typing import Any

import jax

from lora_jax.ops.grouped_matmul.weights import FRAGMENT, FRAGMENTS, ROWS, CodedWeight, in_fragments

_reordered = jax.jit(in_fragments)


def for_kernels(w: Any, backend: str | None = None) -> Any:
    """Return a weight in the order of codes that kernels of a backend, or this one, read fastest.

    On a GPU those are FRAGMENTS, if a device's part of a row is whole ones. Anything but codes
    stays as it is.
    """
    backend = backend or jax.default_backend()
    if backend != "gpu" or not isinstance(w, CodedWeight) or w.order != ROWS:
        return w
    width = w.codes.sharding.shard_shape(w.codes.shape)[-1]
    if width % (FRAGMENT // 2):
        return w
    parts = [_reordered(shard.data) for shard in w.codes.addressable_shards]
    codes = jax.make_array_from_single_device_arrays(w.codes.shape, w.codes.sharding, parts)
    return dataclasses.replace(w, codes=codes, order=FRAGMENTS)
