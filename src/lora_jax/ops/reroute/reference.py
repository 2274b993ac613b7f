"""Sorts (token, expert) rows by expert, in plain jnp: the meaning of the op."""

import jax.numpy as jnp

from lora_jax.typing import Array, Int


def row_map(
    topk_ids: Int[Array, "tokens k"], num_tokens: Int[Array, ""], num_experts: int
) -> tuple[Int[Array, "rows"], Int[Array, "rows"], Int[Array, "experts"]]:
    """Return (order, inverse, group_sizes) of the stable sort of rows t * k + j by topk_ids[t, j].

    Rows of tokens at or after num_tokens, and of ids outside [0, num_experts), come last and are
    in no group.
    """
    tokens, k = topk_ids.shape
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    real = (token < num_tokens) & (topk_ids >= 0) & (topk_ids < num_experts)
    key = jnp.where(real, topk_ids, num_experts).reshape(-1)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * k, dtype=jnp.int32))
    sizes = jnp.zeros((num_experts,), jnp.int32).at[key].add(1, mode="drop")
    return order, inverse, sizes
