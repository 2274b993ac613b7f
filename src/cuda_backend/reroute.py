"""Sorts (token, expert) rows by the matrix they use, by the kernels of csrc/reroute.cuh."""

import jax
import jax.numpy as jnp

from cuda_backend import ffi
from lora_jax.typing import Array, Int

BLOCK_ROWS = 2048  # that one CTA sorts
MAX_GROUPS = 16384  # whose counts fit shared memory
MAX_ROWS = 1 << 24


def check_support(rows: int, groups: int) -> None:
    """Raise NotImplementedError, saying why, for what the kernels do not serve."""
    if not 1 <= rows <= MAX_ROWS:
        raise NotImplementedError(f"cuda reroute takes 1 to {MAX_ROWS} rows, not {rows}")
    if not 1 <= groups <= MAX_GROUPS:
        raise NotImplementedError(f"cuda reroute takes 1 to {MAX_GROUPS} groups, not {groups}")


def row_map(
    topk_ids: Int[Array, "tokens k"], num_tokens: Int[Array, ""], num_experts: int
) -> tuple[Int[Array, "rows"], Int[Array, "rows"], Int[Array, "experts"]]:
    """Return (order, inverse, group_sizes) as lora_jax.ops.reroute.reference.row_map does."""
    return _sorted("lora_jax_cuda_row_map", num_experts, topk_ids, num_tokens)


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
) -> tuple[Int[Array, "rows"], Int[Array, "rows"], Int[Array, "groups"]]:
    """Return (order, inverse, group_sizes) as lora_jax.ops.reroute.reference.reroute does."""
    arrays = (topk_ids, token_to_slot, table, num_tokens)
    return _sorted("lora_jax_cuda_reroute", num_groups, *arrays)


def _sorted(target: str, groups: int, topk_ids: Array, *more: Array) -> tuple[Array, Array, Array]:
    rows = topk_ids.size
    check_support(rows, groups)
    ffi.require()
    blocks = -(-rows // BLOCK_ROWS)
    between = ((blocks, groups + 1), (rows,)) if blocks > 1 else ((1,), (1,))
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((rows,), (rows,), (groups,), *between)]
    order, inverse, sizes, *_ = jax.ffi.ffi_call(target, shapes)(topk_ids, *more)
    return order, inverse, sizes
