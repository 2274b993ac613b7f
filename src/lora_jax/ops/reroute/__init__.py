"""Brings the (token, expert) rows of a mixture of experts together, expert by expert.

With ESFT adapters the experts of a token may be its adapter's own: `reroute` looks them up. With
LoRA the rows of an expert come adapter by adapter, and the same pass cuts them into items.
"""

import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import (
    ANY,
    CPU,
    GPU,
    TPU,
    Implementation,
    Op,
    backend_kernel,
    lazy_kernel,
)
from lora_jax.ops.reroute import cpu, reference
from lora_jax.ops.reroute.maps import RowMap
from lora_jax.typing import Array, Int

__all__ = ["RowMap", "reroute", "row_map"]


def _op(name: str) -> Op:
    """Return row_map or reroute, whose implementations lie side by side.

    A sort is portable as it stands: the reference is also the XLA implementation.
    """
    meaning = getattr(reference, name)
    return Op(
        name,
        (
            Implementation("cuda", GPU, backend_kernel("cuda", name)),
            Implementation("pallas_gpu", GPU, lazy_kernel(f"{__name__}.pallas_gpu", name)),
            Implementation("pallas_tpu", TPU, lazy_kernel(f"{__name__}.pallas_tpu", name)),
            Implementation("ffi", CPU, getattr(cpu, name)),
            Implementation("xla", ANY, meaning),
            Implementation("reference", ANY, meaning),
        ),
    )


ROW_MAP, REROUTE = _op("row_map"), _op("reroute")


def row_map(
    topk_ids: Int[Array, "tokens k"],
    num_tokens: Int[Array, ""],
    num_experts: int,
    *,
    adapters: AdapterItems | None = None,
    implementation: str | None = None,
) -> RowMap:
    """Return the stable counting sort of (token, expert) rows by expert.

    Rows of padding tokens, and of ids outside [0, num_experts), come last and are in no group. With
    the tokens' own `adapters`, rows of a group stand in the order of their tokens there, and the
    map has items, in which rows of no group are not; or neither, where no kernel wants items.

    `implementation` is the name of one; None takes the first that accepts. Raises ValueError naming
    the argument whose shape or dtype is wrong (indices are int32).
    """
    if topk_ids.ndim != 2 or num_tokens.ndim != 0:
        raise ValueError(
            f"row_map: topk_ids {topk_ids.shape} must be rank 2, num_tokens {num_tokens.shape} 0"
        )
    if num_experts < 1:
        raise ValueError(f"row_map: num_experts {num_experts} must be at least 1")
    checks.check_dtype("row_map", jnp.int32, topk_ids=topk_ids, num_tokens=num_tokens)
    _check_adapters("row_map", topk_ids, adapters)
    return ROW_MAP.call(implementation, topk_ids, num_tokens, num_experts, adapters)


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
    *,
    adapters: AdapterItems | None = None,
    implementation: str | None = None,
) -> RowMap:
    """Return the stable counting sort of (token, expert) rows by the matrix that each one uses.

    This is ExpertWeave's batched rerouting (section 4.3), fused with the sort.

    Row t * k + j is in group table[token_to_slot[t], topk_ids[t, j]], or in group topk_ids[t, j]
    when the slot is none of the table's (-1: the base model, LoRA). Padding and ids outside
    [0, experts) come last, in no group. `adapters` and `implementation` as for row_map.

    Raises ValueError naming the argument whose shape or dtype is wrong, and for fewer groups than
    the base model has experts.
    """
    if topk_ids.ndim != 2 or table.ndim != 2 or 0 in table.shape:
        raise ValueError(
            f"reroute: topk_ids {topk_ids.shape} and table {table.shape} must be rank 2, the table "
            "not empty"
        )
    checks.check_shapes(
        "reroute",
        token_to_slot=(tuple(token_to_slot.shape), topk_ids.shape[:1]),
        num_tokens=(tuple(num_tokens.shape), ()),
    )
    ids = {"topk_ids": topk_ids, "token_to_slot": token_to_slot, "table": table}
    checks.check_dtype("reroute", jnp.int32, **ids, num_tokens=num_tokens)
    if num_groups < table.shape[1]:
        raise ValueError(f"reroute: {num_groups} groups do not hold {table.shape[1]} experts")
    _check_adapters("reroute", topk_ids, adapters)
    arrays = (topk_ids, token_to_slot, table, num_tokens)
    return REROUTE.call(implementation, *arrays, num_groups, adapters)


def _check_adapters(
    op: str, topk_ids: Int[Array, "tokens k"], adapters: AdapterItems | None
) -> None:
    if adapters is not None:
        tokens = topk_ids.shape[:1]
        checks.check_shapes(op, adapters=(tuple(adapters.row_to_slot.shape), tokens))
