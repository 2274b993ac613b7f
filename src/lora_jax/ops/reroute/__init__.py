"""Brings the (token, expert) rows of a mixture of experts together, expert by expert.

With ESFT adapters the experts of a token may be its adapter's own: `reroute` looks them up.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lora_jax.ops import dispatch
from lora_jax.ops.reroute import cpu, reference
from lora_jax.typing import Array, Int

__all__ = ["RowMap", "reroute", "row_map"]

# A sort is portable as it stands: the reference is also the XLA implementation.
_KERNELS = {
    "cuda": dispatch.backend("cuda", "row_map"),
    "ffi": cpu.row_map,
    "xla": reference.row_map,
    "reference": reference.row_map,
}
_REROUTE = {
    "cuda": dispatch.backend("cuda", "reroute"),
    "ffi": cpu.reroute,
    "xla": reference.reroute,
    "reference": reference.reroute,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowMap:
    """Where each row t * k + j (token t, its j-th expert) stands among rows sorted by group.

    A group is the rows that use one matrix: an expert of the base or of an adapter.
    """

    order: Int[Array, "rows"]  # sorted place -> row t * k + j
    inverse: Int[Array, "rows"]  # row t * k + j -> sorted place
    group_sizes: Int[Array, "groups"]
    row_to_token: Int[Array, "rows"]  # by sorted place
    row_to_expert: Int[Array, "rows"]  # as the router chose, by sorted place; 0: in no group


def row_map(
    topk_ids: Int[Array, "tokens k"],
    num_tokens: Int[Array, ""],
    num_experts: int,
    *,
    implementation: str | None = None,
) -> RowMap:
    """Return the stable counting sort of (token, expert) rows by expert.

    Rows of padding tokens, and of ids outside [0, num_experts), come last and are in no group.
    """
    if topk_ids.ndim != 2 or num_tokens.ndim != 0:
        raise ValueError(
            f"row_map: topk_ids {topk_ids.shape} must be rank 2, num_tokens {num_tokens.shape} 0"
        )
    if num_experts < 1:
        raise ValueError(f"row_map: num_experts {num_experts} must be at least 1")
    found = dispatch.call(_KERNELS, implementation, topk_ids, num_tokens, num_experts)
    return _with_owners(topk_ids, *found)


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
    *,
    implementation: str | None = None,
) -> RowMap:
    """Return the stable counting sort of (token, expert) rows by the matrix that each one uses.

    Row t * k + j is in group table[token_to_slot[t], topk_ids[t, j]], or in group topk_ids[t, j]
    when the slot is none of the table's (-1: the base model, LoRA). Padding and ids outside
    [0, experts) come last, in no group.
    """
    if topk_ids.ndim != 2 or table.ndim != 2 or 0 in table.shape:
        raise ValueError(
            f"reroute: topk_ids {topk_ids.shape} and table {table.shape} must be rank 2, the table "
            "not empty"
        )
    dispatch.check_shapes(
        "reroute",
        token_to_slot=(tuple(token_to_slot.shape), topk_ids.shape[:1]),
        num_tokens=(tuple(num_tokens.shape), ()),
    )
    if num_groups < table.shape[1]:
        raise ValueError(f"reroute: {num_groups} groups do not hold {table.shape[1]} experts")
    found = dispatch.call(
        _REROUTE, implementation, topk_ids, token_to_slot, table, num_tokens, num_groups
    )
    return _with_owners(topk_ids, *found)


def _with_owners(
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
