"""The likely tokens of all rows at once, without a loop: portable JAX.

No loop and no sort, so that a GPU runs it inside a CUDA graph.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from lora_jax.ops.keep_likely.reference import joined, keep_in_row, weight_halves
from lora_jax.typing import Array, Float, Int, UInt32

_DIGIT_BITS = 2  # of a threshold, found at a time


def keep_likely(
    logits: Float[Array, "rows vocab"],
    min_p: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
) -> Float[Array, "rows vocab"]:
    """Same result as the reference, to the bit."""
    keep = functools.partial(keep_in_row, search=threshold_by_digits)
    return jax.vmap(keep)(logits, min_p, top_k, top_p)


def threshold_by_digits(
    image: UInt32[Array, "vocab"], weights: UInt32[Array, "vocab"], wanted: Float[Array, ""]
) -> UInt32[Array, ""]:
    """Return what threshold_by_bits does, by a pass over the row for every digit.

    Passes have the same instructions, the digit's place being data, so that they are compiled once.
    """
    zero, threshold, unit = jnp.uint32(0), jnp.uint32(0), jnp.uint32(1 << (32 - _DIGIT_BITS))
    image, weights = lax.optimization_barrier((image, weights))
    for _ in range(32 // _DIGIT_BITS):
        threshold, unit = lax.optimization_barrier((threshold, unit))
        trials = [threshold + jnp.uint32(i) * unit for i in range(1, 1 << _DIGIT_BITS)]
        kept = [weight_halves(jnp.where(image >= trial, weights, zero)) for trial in trials]
        halves = [half for pair in kept for half in pair]
        sums = lax.reduce(halves, [zero] * len(halves), _add_each, (0,))
        totals = [joined(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
        threshold = threshold + sum((total >= wanted).astype(jnp.uint32) for total in totals) * unit
        unit = unit >> jnp.uint32(_DIGIT_BITS)
    return threshold


def _add_each(xs: list[Array], ys: list[Array]) -> list[Array]:
    return [x + y for x, y in zip(xs, ys, strict=True)]
