"""Rows brought together by adapter and cut into items: what a kernel of grouped LoRA works through.

Made once per step for tokens; for (token, expert) rows ops.reroute makes them in its own pass, so
that no linear map sorts again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.dispatch import ANY, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.row_items import places
from lora_jax.typing import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterItems:
    """Items of rows that share an adapter and an expert; those from num_items on mean nothing.

    Every row with an adapter is in exactly one item, the others in none. How a run of equal rows is
    cut is up to whoever makes them, and no result depends on it.
    """

    row_to_slot: Int[Array, "rows"]  # -1: none
    order: Int[Array, "rows"]  # place -> row
    items: Int[Array, "rows 4"]  # slot, expert, first place, number of places
    num_items: Int[Array, "1"]
    # The same rows once more, as a backend's kernels of long runs want them.
    tiles: Any = None
    # None of the slots has a larger rank, where that is known: small ranks want small items.
    max_rank: int | None = dataclasses.field(default=None, metadata={"static": True})
    # How many runs of one adapter and expert there are at most, where that is known: many rows in
    # few runs are for other kernels than few rows in many.
    most_runs: int | None = dataclasses.field(default=None, metadata={"static": True})
    # Whether a place is its own row, as after a sort by expert.
    in_order: bool = dataclasses.field(default=False, metadata={"static": True})


def reference(
    row_to_slot: Int[Array, "rows"], num_slots: int, max_rank: int | None = None
) -> AdapterItems:
    """Return the rows in the stable order of their slots, those without one last."""
    slots = _known(row_to_slot, num_slots)
    order = jnp.argsort(jnp.where(slots < 0, num_slots, slots), stable=True).astype(jnp.int32)
    return AdapterItems(slots, order, *cut(slots[order], jnp.zeros_like(slots)), max_rank=max_rank)


def cut(
    slots: Int[Array, "rows"], experts: Int[Array, "rows"], item_rows: int = 32
) -> tuple[Int[Array, "rows 4"], Int[Array, "1"]]:
    """Return (items, num_items) of rows that stand in order; those of slot -1 are in none."""
    rows = slots.shape[0]
    position = jnp.arange(rows, dtype=jnp.int32)
    same = (slots[1:] == slots[:-1]) & (experts[1:] == experts[:-1])
    begins = jnp.pad(~same, (1, 0), constant_values=True) | (position % item_rows == 0)
    next_begin = jax.lax.cummin(jnp.where(begins, position, rows), reverse=True)
    end = jnp.append(next_begin[1:], jnp.int32(rows))
    kept = begins & (slots >= 0)
    start = places(kept, rows)
    at = jnp.minimum(start, rows - 1)
    items = jnp.stack([slots[at], experts[at], start, end[at] - start], axis=1)
    return items, jnp.sum(kept, dtype=jnp.int32)[None]


def _none(row_to_slot: Int[Array, "rows"], num_slots: int, max_rank: int | None) -> None:
    """Return no items: the other implementations of lora_gemm want none."""


ADAPTER_ITEMS = Op(
    "adapter_items",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "adapter_items")),
        Implementation("xla", ANY, _none, stands_in=True),
        Implementation("reference", ANY, reference),
    ),
)


def adapter_items(
    row_to_slot: Int[Array, "rows"],
    num_slots: int,
    *,
    max_rank: int | None = None,
    implementation: str | None = None,
) -> AdapterItems | None:
    """Return the items of rows of linear maps without experts, None where no kernel wants them.

    Slots outside [0, num_slots) are no adapter; none has more than max_rank rank rows.
    `implementation` is the name of one; None takes the first that accepts. Raises ValueError for
    slots that are not int32 of rank 1, and for num_slots below 1.
    """
    if row_to_slot.ndim != 1 or num_slots < 1:
        raise ValueError(
            f"adapter_items: row_to_slot {row_to_slot.shape} must be rank 1, num_slots {num_slots} "
            "at least 1"
        )
    checks.check_dtype("adapter_items", jnp.int32, row_to_slot=row_to_slot)
    slots = _known(row_to_slot, num_slots)
    return ADAPTER_ITEMS.call(implementation, slots, num_slots, max_rank)


def _known(row_to_slot: Int[Array, "rows"], num_slots: int) -> Int[Array, "rows"]:
    return jnp.where((row_to_slot >= 0) & (row_to_slot < num_slots), row_to_slot, -1)
