"""The likely tokens of one row by min_p, top_k and top_p, in plain jnp: the meaning of the op."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lora_jax.typing import Array, Float, Int, UInt32


def keep_likely(
    logits: Float[Array, "rows vocab"],
    min_p: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
) -> Float[Array, "rows vocab"]:
    """Return logits with dropped tokens at -inf; a row applies min_p, then top_k, then top_p.

    min_p = 0, top_k = 0 and top_p = 1 drop nothing.
    """
    return jax.vmap(functools.partial(keep_in_row, search=threshold_by_bits))(
        logits, min_p, top_k, top_p
    )


def keep_in_row(
    logits: Float[Array, "vocab"],
    min_p: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
    search: "Search",
) -> Float[Array, "vocab"]:
    """Return the logits of one row with dropped tokens at -inf; all rows do the same work."""
    logits = jnp.where(min_p > 0, keep_min_p(logits, min_p), logits)
    logits = jnp.where(top_k > 0, keep_top_k(logits, top_k, search), logits)
    return jnp.where(top_p < 1, keep_top_p(logits, top_p, search), logits)


def keep_min_p(logits: Float[Array, "vocab"], min_p: Float[Array, ""]) -> Float[Array, "vocab"]:
    """Return logits with tokens less likely than min_p times the most likely one at -inf."""
    return jnp.where(jnp.exp(logits - jnp.max(logits)) >= min_p, logits, -jnp.inf)


# Returns the largest integer t for which weights[image >= t] sum to `wanted` at least.
Search = Callable[[UInt32[Array, "vocab"], UInt32[Array, "vocab"], Float[Array, ""]], Array]

# Weights are integers up to 2^26 and are added in two halves of 13 bits, exact for vocabularies of
# less than 2^19 tokens. So no sum depends on its order, which XLA chooses by the whole program.
_WEIGHT_BITS, _HALF_BITS = 26, 13
MOST_TOKENS = (1 << 32 - _HALF_BITS) - 1


def check_vocab(size: int) -> None:
    """Raise ValueError for a vocabulary whose sums of weights would overflow."""
    if size > MOST_TOKENS:
        raise ValueError(
            f"The model has a vocabulary of {size:,} tokens; top_p is exact for up to "
            f"{MOST_TOKENS:,}. Take a model with a smaller one."
        )


def weight_halves(weights: UInt32[Array, "vocab"]) -> tuple[Array, Array]:
    """Return the upper and the lower bits of weights, which are summed separately."""
    return weights >> jnp.uint32(_HALF_BITS), weights & jnp.uint32((1 << _HALF_BITS) - 1)


def joined(upper: UInt32[Array, ""], lower: UInt32[Array, ""]) -> Float[Array, ""]:
    """Return the sum of weights from the sums of their upper and lower halves."""
    return upper.astype(jnp.float32) * (1 << _HALF_BITS) + lower.astype(jnp.float32)


def weight_sum(weights: UInt32[Array, "vocab"]) -> Float[Array, ""]:
    """Return the sum of weights, rounded once."""
    return joined(*(jnp.sum(half) for half in weight_halves(weights)))


def threshold_by_bits(
    image: UInt32[Array, "vocab"], weights: UInt32[Array, "vocab"], wanted: Float[Array, ""]
) -> UInt32[Array, ""]:
    """Return the threshold of a `Search`, found bit by bit.

    32 passes over the row find the exact threshold, where sorting it would cost 20 times as much.
    """

    def step(index: Int[Array, ""], threshold: UInt32[Array, ""]) -> UInt32[Array, ""]:
        trial = threshold | lax.shift_left(jnp.uint32(1), jnp.asarray(31 - index, jnp.uint32))
        kept = jnp.where(image >= trial, weights, jnp.uint32(0))
        return jnp.where(weight_sum(kept) >= wanted, trial, threshold)

    return lax.fori_loop(0, 32, step, jnp.uint32(0))


def keep_top_k(
    logits: Float[Array, "vocab"], top_k: Int[Array, ""], search: Search = threshold_by_bits
) -> Float[Array, "vocab"]:
    """Return logits with all but the k most likely tokens at -inf; ties with the k-th stay."""
    image = ordered_image(logits)
    threshold = search(image, jnp.ones(image.shape, jnp.uint32), top_k.astype(jnp.float32))
    return jnp.where(image >= threshold, logits, -jnp.inf)


def keep_top_p(
    logits: Float[Array, "vocab"], top_p: Float[Array, ""], search: Search = threshold_by_bits
) -> Float[Array, "vocab"]:
    """Return logits with all but the smallest most likely set of probability >= top_p at -inf.

    Probabilities count in steps of 2^-26 of the largest. Raises ValueError as check_vocab does.
    """
    check_vocab(logits.shape[0])
    image = ordered_image(logits)
    shares = jnp.exp(logits - jnp.max(logits)) * (1 << _WEIGHT_BITS)
    weights = jnp.round(shares).astype(jnp.uint32)
    threshold = search(image, weights, top_p * weight_sum(weights))
    return jnp.where(image >= threshold, logits, -jnp.inf)


def ordered_image(values: Float[Array, "vocab"]) -> UInt32[Array, "vocab"]:
    """Return unsigned integers in the order of the floats (none NaN); equal floats stay equal."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)
