"""Data types of the row map."""

import dataclasses

import jax
import jax.numpy as jnp

from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.typing import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowMap:
    """Place of each row t * k + j (token t, its j-th expert) among rows sorted by group.

    A group is the rows that use one matrix: an expert of the base or of an adapter.
    """

    order: Int[Array, "rows"]  # sorted place -> row t * k + j
    inverse: Int[Array, "rows"]  # row t * k + j -> sorted place
    group_sizes: Int[Array, "groups"]
    row_to_token: Int[Array, "rows"]  # by sorted place
    row_to_expert: Int[Array, "rows"]  # as the router chose, by sorted place; 0: in no group
    items: AdapterItems | None = None  # of the sorted rows, where tokens came with theirs


def with_owners(
    topk_ids: Int[Array, "tokens k"],
    order: Int[Array, "rows"],
    inverse: Int[Array, "rows"],
    sizes: Int[Array, "groups"],
) -> RowMap:
    """Return the map with the token and the chosen expert of every sorted place."""
    rows, k = order.shape[0], topk_ids.shape[1]
    grouped = jnp.arange(rows, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    expert = jnp.where(grouped, topk_ids.reshape(-1)[order], 0)
    return RowMap(order, inverse, sizes, order // k, expert)
