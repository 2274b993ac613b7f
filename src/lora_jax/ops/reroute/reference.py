"""Sorts (token, expert) rows by the matrix they use, in plain jnp: the meaning of the op."""

import dataclasses

import jax.numpy as jnp

from lora_jax.ops.adapter_items import AdapterItems, cut
from lora_jax.ops.reroute.maps import RowMap, with_owners
from lora_jax.typing import Array, Int


def row_map(
    topk_ids: Int[Array, "tokens k"],
    num_tokens: Int[Array, ""],
    num_experts: int,
    adapters: AdapterItems | None = None,
) -> RowMap:
    """Return the stable sort of rows t * k + j by topk_ids[t, j], as `RowMap` describes."""
    return _sorted(topk_ids, topk_ids, num_tokens, num_experts, adapters)


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
    adapters: AdapterItems | None = None,
) -> RowMap:
    """Return the stable sort of rows t * k + j by looked_up(...)[t, j]."""
    groups = looked_up(topk_ids, token_to_slot, table)
    return _sorted(topk_ids, groups, num_tokens, num_groups, adapters)


def looked_up(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
) -> Int[Array, "tokens k"]:
    """Return g[t, j] = table[token_to_slot[t], topk_ids[t, j]], -1 for ids outside [0, experts).

    A slot outside [0, slots) is no adapter: g = topk_ids (ExpertWeave, section 4.3).
    """
    slots, experts = table.shape
    row = jnp.clip(token_to_slot, 0, slots - 1)[:, None]
    moved = table[row, jnp.clip(topk_ids, 0, experts - 1)]
    valid = (token_to_slot >= 0) & (token_to_slot < slots)
    groups = jnp.where(valid[:, None], moved, topk_ids)
    return jnp.where((topk_ids >= 0) & (topk_ids < experts), groups, -1)


def _sorted(
    topk_ids: Int[Array, "tokens k"],
    groups: Int[Array, "tokens k"],
    num_tokens: Int[Array, ""],
    num_groups: int,
    adapters: AdapterItems | None,
) -> RowMap:
    """Return the map of rows by group; in a group, rows are in the order of `adapters`' tokens."""
    tokens, k = topk_ids.shape
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    real = (token < num_tokens) & (groups >= 0) & (groups < num_groups)
    key = jnp.where(real, groups, num_groups).reshape(-1)
    if adapters is None:
        order = jnp.argsort(key, stable=True).astype(jnp.int32)
    else:
        places = jnp.arange(k, dtype=jnp.int32)
        visited = (adapters.order[:, None] * k + places[None]).reshape(-1)
        order = visited[jnp.argsort(key[visited], stable=True)]
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * k, dtype=jnp.int32))
    sizes = jnp.zeros((num_groups,), jnp.int32).at[key].add(1, mode="drop")
    map = with_owners(topk_ids, order, inverse, sizes)
    if adapters is None:
        return map
    grouped = jnp.arange(tokens * k, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    slots = jnp.where(grouped, adapters.row_to_slot[map.row_to_token], -1)
    items = AdapterItems(slots, jnp.arange(tokens * k), *cut(slots, map.row_to_expert))
    return dataclasses.replace(map, items=items)
