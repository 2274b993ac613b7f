"""Zeros of one sign, for sorts: lax.top_k puts 0.0 before -0.0, which compare as equal."""

import jax
import jax.numpy as jnp

from lora_jax.typing import Array, Float


def unsigned_zeros(values: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return the values with 0.0 for each -0.0; the derivative is 1, also of a zero."""
    to_zero = jax.lax.stop_gradient(jnp.where(values == 0, -values, 0.0))
    return values + to_zero
