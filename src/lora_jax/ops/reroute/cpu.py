"""Sorts (token, expert) rows by expert, by the C++ counting sort of ops/cpu/reroute.h.

Looking up an adapter's own experts is part of the same pass. The C++ LoRA kernel wants no items, so
that none are made.
"""

import jax
import jax.numpy as jnp

from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.cpu import build
from lora_jax.ops.reroute.maps import RowMap, with_owners
from lora_jax.typing import Array, Int


def row_map(
    topk_ids: Int[Array, "tokens k"],
    num_tokens: Int[Array, ""],
    num_experts: int,
    adapters: AdapterItems | None = None,
) -> RowMap:
    """Same result as the reference, without items."""
    return _called("lora_jax_row_map", num_experts, topk_ids, num_tokens)


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
    adapters: AdapterItems | None = None,
) -> RowMap:
    """Same result as the reference, without items."""
    arrays = (topk_ids, token_to_slot, table, num_tokens)
    return _called("lora_jax_reroute", num_groups, *arrays)


def _called(target: str, groups: int, topk_ids: Array, *more: Array) -> RowMap:
    build.require()
    rows = jax.ShapeDtypeStruct((topk_ids.size,), jnp.int32)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    call = jax.ffi.ffi_call(target, (rows, rows, sizes))
    order, inverse, group_sizes = call(topk_ids, *more)
    return with_owners(topk_ids, order, inverse, group_sizes)
