"""Sorts (token, expert) rows by the matrix they use and cuts adapters' items: csrc/reroute."""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi, lora_gemm, lora_tiles
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.reroute.maps import RowMap
from lora_jax.typing import Array, Int

CLUSTER_ROWS, CLUSTER_GROUPS = 16384, 1023  # that one launch sorts; more are shared out
COUNT_ROWS = 2048  # that one CTA counts, in two blocks
# From so many rows of a slot and expert on tiles pay: gate and up of 6144 rows of 64 experts, rank
# 64, take 73 us on an H200, by items 87. A layer of 512 rows of 8 experts, Mixtral's shape, takes
# 75.5 with the tiles' own launch, by items 87.6: gate and up 40.8 and 49.9, down 22.0 and 32.0.
LONG_RUN = 64
MAX_GROUPS = 16384  # whose counts fit its shared memory
MAX_ROWS = 1 << 18
MAX_K = 8192


def check_support(tokens: int, k: int, groups: int) -> None:
    """Raise Declined, saying why, for what the kernels do not serve."""
    rows = tokens * k
    if not 1 <= rows <= MAX_ROWS:
        raise Declined(f"cuda reroute takes 1 to {MAX_ROWS} rows, not {rows}")
    if k > MAX_K:
        raise Declined(f"cuda reroute takes {MAX_K} experts of a token, not {k}")
    if not 1 <= groups <= MAX_GROUPS:
        raise Declined(f"cuda reroute takes 1 to {MAX_GROUPS} groups, not {groups}")


def adapter_items(
    row_to_slot: Int[Array, "rows"], num_slots: int, max_rank: int | None = None
) -> AdapterItems:
    """Return the rows of each slot as items, as lora_jax.ops.adapter_items says."""
    rows = row_to_slot.shape[0]
    if rows > lora_gemm.MAX_ROWS:
        return _shared_out(row_to_slot, num_slots, max_rank)
    lora_gemm.check_support(jnp.dtype(jnp.bfloat16), rows, (), num_slots, 1)
    ffi.require()
    rank = max_rank or lora_gemm.MAX_RANK
    work_list = lora_gemm.row_items(row_to_slot, jnp.zeros_like(row_to_slot), num_slots, rank)
    tiles = work_list.tiles if work_list.shrinks_tiles else None
    fields = work_list.order, work_list.items, work_list.num_items, tiles
    return AdapterItems(row_to_slot, *fields, max_rank=max_rank, most_runs=num_slots)


def _shared_out(
    row_to_slot: Int[Array, "rows"], num_slots: int, max_rank: int | None
) -> AdapterItems:
    """More rows than one CTA sorts: the row map of tokens whose one expert is their slot."""
    rows = row_to_slot.shape[0]
    nothing = jnp.zeros((rows, 4), jnp.int32)
    row = jnp.arange(rows, dtype=jnp.int32)
    as_they_come = AdapterItems(row_to_slot, row, nothing, nothing[0, :1], max_rank=max_rank)
    map = row_map(row_to_slot[:, None], jnp.int32(rows), num_slots, as_they_come)
    assert map.items is not None
    items = map.items.items.at[:, 1].set(0)  # no experts here
    return AdapterItems(row_to_slot, map.order, items, map.items.num_items, max_rank=max_rank)


def row_map(
    topk_ids: Int[Array, "tokens k"],
    num_tokens: Int[Array, ""],
    num_experts: int,
    adapters: AdapterItems | None = None,
) -> RowMap:
    """Return the map as lora_jax.ops.reroute.reference.row_map does."""
    return _mapped(topk_ids, num_tokens, num_experts, (), adapters)


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
    adapters: AdapterItems | None = None,
) -> RowMap:
    """Return the map as lora_jax.ops.reroute.reference.reroute does."""
    return _mapped(topk_ids, num_tokens, num_groups, (token_to_slot, table), adapters)


def _mapped(
    topk_ids: Array,
    num_tokens: Array,
    groups: int,
    table: tuple[Array, ...],
    adapters: AdapterItems | None,
) -> RowMap:
    tokens, k = topk_ids.shape
    check_support(tokens, k, groups)
    ffi.require()
    rows = tokens * k
    shared = rows > CLUSTER_ROWS or groups > CLUSTER_GROUPS
    # What one launch leaves to the next: owners, and pairs of counts by CTA and part (counts_of)
    between = rows if shared else 1
    counts = -(-rows // COUNT_ROWS) * 3 * (groups // 2 + 1) if shared else 1
    shapes: list[tuple[int, ...]] = [(rows,), (rows,), (groups,), (rows,), (rows,), (counts,)]
    owners, item_rows, runs, rank = (), 0, None, lora_gemm.MAX_RANK
    if adapters is not None:
        owners = (adapters.row_to_slot, adapters.order)
        experts = table[1].shape[1] if table else groups
        runs = None if adapters.most_runs is None else adapters.most_runs * experts
        rank = adapters.max_rank or rank
        item_rows = lora_gemm.rows_per_item(rows, rank, runs)
        shapes += [(rows, 4), (1,), (between,)]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    call = jax.ffi.ffi_call("lora_jax_cuda_row_map", outputs)
    attributes = {"rerouted": bool(table), "item_rows": np.int64(item_rows)}
    out = call(topk_ids, num_tokens, *table, *owners, **attributes)
    order, inverse, sizes, token, expert = out[:5]
    items = None
    if adapters is not None:
        row = jnp.arange(rows, dtype=jnp.int32)  # they are in order
        slots = jnp.where(row < jnp.sum(sizes), adapters.row_to_slot[token], -1)
        tiles = _tiles_of(out[6], out[7], row, runs, rank)
        options = {"tiles": tiles, "max_rank": adapters.max_rank, "most_runs": runs}
        items = AdapterItems(slots, row, out[6], out[7], **options, in_order=True)
    return RowMap(order, inverse, sizes, token, expert, items)


def _tiles_of(
    items: Int[Array, "rows 4"],
    num_items: Int[Array, "1"],
    order: Int[Array, "rows"],
    most_runs: int | None,
    max_rank: int,
) -> lora_tiles.Tiles | None:
    """Return the rows of experts as tiles where some runs of one adapter are bound to be long.

    Not at ranks of which segments have a kernel of their own, nor at lower ones.
    """
    rows = len(items)
    if most_runs is None or rows < LONG_RUN * most_runs or rows > lora_gemm.MAX_ROWS:
        return None
    if max_rank <= max(lora_gemm.SEGMENT_RANKS):
        return None
    return lora_tiles.row_tiles(items, num_items, order)
