"""Sorts (token, expert) rows by expert, by the C++ counting sort of ops/cpu/reroute.h.

Looking up an adapter's own experts is part of the same pass.
"""

import jax
import jax.numpy as jnp

from lora_jax.ops.cpu import build
from lora_jax.typing import Array, Int


def row_map(
    topk_ids: Int[Array, "tokens k"], num_tokens: Int[Array, ""], num_experts: int
) -> tuple[Int[Array, "rows"], Int[Array, "rows"], Int[Array, "experts"]]:
    """What the reference says."""
    build.require()
    rows = jax.ShapeDtypeStruct((topk_ids.size,), jnp.int32)
    sizes = jax.ShapeDtypeStruct((num_experts,), jnp.int32)
    call = jax.ffi.ffi_call("lora_jax_row_map", (rows, rows, sizes))
    order, inverse, group_sizes = call(topk_ids, num_tokens)
    return order, inverse, group_sizes


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
) -> tuple[Int[Array, "rows"], Int[Array, "rows"], Int[Array, "groups"]]:
    """What the reference says."""
    build.require()
    rows = jax.ShapeDtypeStruct((topk_ids.size,), jnp.int32)
    sizes = jax.ShapeDtypeStruct((num_groups,), jnp.int32)
    call = jax.ffi.ffi_call("lora_jax_reroute", (rows, rows, sizes))
    order, inverse, group_sizes = call(topk_ids, token_to_slot, table, num_tokens)
    return order, inverse, group_sizes
