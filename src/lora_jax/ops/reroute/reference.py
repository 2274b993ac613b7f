"""Sorts (token, expert) rows by the matrix they use, in plain jnp: the meaning of the op."""

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


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
) -> tuple[Int[Array, "rows"], Int[Array, "rows"], Int[Array, "groups"]]:
    """Return `row_map` of g[t, j] = table[token_to_slot[t], topk_ids[t, j]] into num_groups groups.

    A slot outside [0, slots) is no adapter: g = topk_ids. Ids outside [0, experts) are in no group
    (ExpertWeave, section 4.3).
    """
    slots, experts = table.shape
    row = jnp.clip(token_to_slot, 0, slots - 1)[:, None]
    moved = table[row, jnp.clip(topk_ids, 0, experts - 1)]
    known = (token_to_slot >= 0) & (token_to_slot < slots)
    groups = jnp.where(known[:, None], moved, topk_ids)
    groups = jnp.where((topk_ids >= 0) & (topk_ids < experts), groups, -1)
    return row_map(groups, num_tokens, num_groups)
