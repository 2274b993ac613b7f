"""The top k experts of each token by softmax, in plain jnp: the meaning of the op."""

import jax
import jax.numpy as jnp

from lora_jax.config import MoeConfig
from lora_jax.ops.zeros import unsigned_zeros
from lora_jax.typing import Array, Float, Int


def choose_experts(
    logits: Float[Array, "tokens experts"], moe: MoeConfig
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """Return weights p[t, ids] and ids = the k largest p[t, e], p = softmax over e of logits[t].

    With groups of experts only those of the `topk_groups` groups with the best experts count.
    Without `softmax_first` the softmax runs over the chosen experts alone. Weights are divided by
    their norm of order `topk_norm`, if any, and multiplied by `weight_scale`.
    """
    p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    _, ids = top_k(_allowed(logits, moe), moe.top_k)
    if moe.softmax_first:
        weights = jnp.take_along_axis(p, ids, axis=-1)
    else:
        weights = jax.nn.softmax(jnp.take_along_axis(logits, ids, axis=-1), axis=-1)
    if moe.topk_norm is not None:
        power = jnp.float32(moe.topk_norm)
        weights = weights / jnp.sum(weights**power, axis=-1, keepdims=True) ** (1 / power)
    return weights * jnp.float32(moe.weight_scale), ids


def top_k(
    values: Float[Array, "tokens n"], k: int
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """Return the k largest values and their places, of equal ones the lower place first.

    -0.0 equals 0.0, and is returned as 0.0.
    """
    largest, places = jax.lax.top_k(unsigned_zeros(values), k)
    return largest, places


def _allowed(
    logits: Float[Array, "tokens experts"], moe: MoeConfig
) -> Float[Array, "tokens experts"]:
    """Return logits with -inf outside the groups whose best expert is among the best."""
    if moe.num_groups <= 1:
        return logits
    grouped = logits.reshape(logits.shape[0], moe.num_groups, -1)
    _, best = top_k(jnp.max(grouped, axis=-1), moe.topk_groups)
    kept = jnp.any(jax.nn.one_hot(best, moe.num_groups, dtype=bool), axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(logits.shape)
