"""Brings the (token, expert) rows of a mixture of experts together, expert by expert."""

import dataclasses

import jax
import jax.numpy as jnp

from lora_jax.ops import dispatch
from lora_jax.ops.reroute import cpu, reference
from lora_jax.typing import Array, Int

__all__ = ["RowMap", "row_map"]

# A sort is portable as it stands: the reference is also the XLA implementation.
_KERNELS = {"ffi": cpu.row_map, "xla": reference.row_map, "reference": reference.row_map}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowMap:
    """Where each row t * k + j (token t, its j-th expert) stands among rows sorted by expert."""

    order: Int[Array, "rows"]  # sorted place -> row t * k + j
    inverse: Int[Array, "rows"]  # row t * k + j -> sorted place
    group_sizes: Int[Array, "experts"]
    row_to_token: Int[Array, "rows"]  # by sorted place
    row_to_expert: Int[Array, "rows"]  # by sorted place; 0 for rows in no group


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
    order, inverse, sizes = dispatch.call(
        _KERNELS, implementation, topk_ids, num_tokens, num_experts
    )
    rows, k = order.shape[0], topk_ids.shape[1]
    grouped = jnp.arange(rows, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    expert = jnp.where(grouped, topk_ids.reshape(-1)[order], 0)
    return RowMap(order, inverse, sizes, order // k, expert)
