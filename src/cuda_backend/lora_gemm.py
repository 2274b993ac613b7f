"""Adds adapters to rows by the Hopper kernels of csrc/lora_gemm, in place if there is a y.

A row's result depends on nothing but its own x, y and adapter: neither on its neighbours nor on
how many rows there are. Calls of many rows serve long segments by the kernels of
csrc/lora_gemm/prefill_shrink.cuh, which give the same bits.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi, lora_int8, lora_rows, lora_tiles
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.rank_rows import value_width
from lora_jax.typing import Array, Float, Int, Num

MAX_ROWS = 8192  # one CTA sorts them in its shared memory
MAX_SLOTS = 65534
# Up to FEW_ROWS are for csrc/lora_gemm/decode.cuh, which wants items of at most SMALL_ITEM rows. Of
# few slots more rows are: it serves most linear maps of such a step.
FEW_ROWS, SMALL_ITEM = 128, 8
FEW_ROWS_OF_FEW_SLOTS, FEW_SLOTS = 256, 16
MAX_RANK = 128
COLUMNS = 64  # widths are copied in pieces of so many columns
MAX_MODULES = 4  # of one launch
# csrc/lora_gemm/segments.cuh takes ranks to 32, and pays (timed above 16) from so many rows of a
# run of one adapter and expert on. So few items leave CTAs idle, even by two modules in a launch.
SEGMENT_RANKS, SEGMENT_ROWS, FEW_ITEMS = range(17, 33), 16, 66

NO_CUT = np.zeros(4, np.int32)  # one constant of a program: it is a kernel's argument often

# One linear map of a launch: y, and the entries and scaling of its slots, or of all sites. No y of
# a launch is None, or all are: then nothing is added to, and rows without an adapter are zeros.
Module = tuple[Array | None, Array, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CudaWorkList:
    """Rows sorted by slot and cut into items and tiles: what the kernels work through."""

    order: Int[Array, "rows"]  # sorted place -> row
    items: Int[Array, "rows 4"]  # slot, expert, first place, number of rows
    num_items: Int[Array, "1"]
    tiles: lora_tiles.Tiles | None = None  # the same rows once more, where some may be in tiles
    # Whether a launch that does both should take the tiles: see lora_tiles.shrink_pays.
    shrinks_tiles: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def arrays(self) -> tuple[Array | np.ndarray, ...]:
        """Arguments of a launch that shrinks and expands."""
        return self.tiled_arrays if self.shrinks_tiles else self.untiled_arrays

    @property
    def untiled_arrays(self) -> tuple[Array | np.ndarray, ...]:
        """Arguments of a launch that handles all rows as items.

        The tiles that are not there are made in the program: XLA's compiler for GPUs crashes over a
        constant without elements that a part of a step over several devices takes (jax 0.11.2).
        """
        no_tiles = jnp.zeros((0, lora_tiles.RECORD), jnp.int32)
        return self.order, self.items, self.num_items, no_tiles, NO_CUT

    @property
    def tiled_arrays(self) -> tuple[Array | np.ndarray, ...]:
        """Arguments of a launch that shrinks or expands alone: one kernel has items and tiles."""
        if self.tiles is None:
            return self.untiled_arrays
        return self.order, *(getattr(self.tiles, f.name) for f in dataclasses.fields(self.tiles))


def check_support(
    dtype: jnp.dtype, rows: int, widths: tuple[int, ...], slots: int, max_rank: int
) -> None:
    """Raise Declined, saying why, for what these kernels do not serve."""
    if dtype != jnp.bfloat16:
        raise Declined(f"cuda lora_gemm takes bfloat16, not {dtype}")
    if not 1 <= rows <= MAX_ROWS:
        raise Declined(f"cuda lora_gemm takes 1 to {MAX_ROWS} rows, not {rows}")
    if bad := [w for w in widths if w % COLUMNS]:
        raise Declined(f"cuda lora_gemm takes widths in steps of {COLUMNS}, not {bad}")
    if not 1 <= max_rank <= MAX_RANK:
        raise Declined(f"cuda lora_gemm takes ranks to {MAX_RANK}, not {max_rank}")
    if not 1 <= slots <= MAX_SLOTS:
        raise Declined(f"cuda lora_gemm takes 1 to {MAX_SLOTS} slots, not {slots}")


def rows_per_item(
    rows: int,
    max_rank: int = MAX_RANK,
    most_runs: int | None = None,
    num_slots: int | None = None,
) -> int:
    """Return how many rows an item may have; no result depends on it.

    There are at most `most_runs` of one adapter and expert, of rows that stand in order, or None.
    Rows of linear maps have the adapters of `num_slots`; None: they are experts' rows.
    Few rows are spread over more CTAs, many share the loads of their adapter; at low ranks those
    are too few to wait for (1024 rows of 512 adapters of rank 16 on an H200: 55.7 us by 16 rows,
    59.0 by 32).
    """
    few_slots = num_slots is not None and num_slots <= FEW_SLOTS
    if rows <= (FEW_ROWS_OF_FEW_SLOTS if few_slots else FEW_ROWS) or max_rank <= 8:
        return SMALL_ITEM
    if most_runs is not None and are_segments(rows, max_rank, most_runs):
        # 64 experts of 24 rows: gate and up 19.5 us by 16, 21.6 by 32; 128 of 16: 27.7 and 24.7.
        return 16 if most_runs * -(-rows // (most_runs * 32)) <= FEW_ITEMS else 32
    return 16 if max_rank <= 16 else 32


def are_segments(rows: int, max_rank: int, most_runs: int | None) -> bool:
    """Return whether rows that stand in order, in so many runs, are for segments.cuh."""
    if most_runs is None or max_rank not in SEGMENT_RANKS:
        return False
    return rows > FEW_ROWS and rows >= SEGMENT_ROWS * most_runs


def row_items(
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"],
    num_slots: int,
    max_rank: int = MAX_RANK,
) -> CudaWorkList:
    """Return the rows of each (slot, expert) as items; rows outside 0..num_slots are in none.

    Rows of one slot should come sorted by expert: else the items are right, but smaller.
    """
    rows = row_to_slot.shape[0]
    item_rows = rows_per_item(rows, max_rank, num_slots=num_slots)
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((rows,), (rows, 4), (1,))]
    call = jax.ffi.ffi_call("lora_jax_cuda_row_items", shapes)
    attributes = {"slots": np.int64(num_slots), "item_rows": np.int64(item_rows)}
    order, items, num_items = call(row_to_slot, row_to_expert, **attributes)
    if rows < lora_tiles.FEWEST_ROWS:
        return CudaWorkList(order, items, num_items)
    tiles = lora_tiles.row_tiles(items, num_items, order)
    pays = lora_tiles.shrink_pays(rows, num_slots, max_rank)
    return CudaWorkList(order, items, num_items, tiles, pays)


def lora_gemm(
    ys: Sequence[Float[Array, "rows d_out"] | None],
    batch: LoraBatch,
    sites: Sequence[int | None] = (None,),
    *,
    zeros_if_idle: bool = True,
) -> tuple[Float[Array, "rows d_out"], ...]:
    """y[t] + s * sum_j (x[t] . A[j]) B[j], as lora_jax.ops.lora_gemm says; h is in bfloat16.

    `zeros_if_idle` is that of lora_jax.ops.lora_gemms.
    """
    modules = [(y, batch.entries, batch.scaling) for y in ys]
    owners = (batch.row_to_slot, batch.row_to_expert)
    arrays = (batch.x, batch.a_pool, batch.b_pool, *owners)
    return lora_gemms(
        modules,
        *arrays,
        batch.max_rank,
        items=batch.items,
        sites=[site or 0 for site in sites],
        zeros_if_idle=zeros_if_idle,
    )


def lora_gemms(
    modules: Sequence[Module],
    x: Float[Array, "rows d_in"],
    a_pool: Num[Array, "a_rows a_items"],
    b_pool: Num[Array, "b_rows b_items"],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"],
    max_rank: int,
    items: AdapterItems | None = None,
    sites: Sequence[int] | None = None,
    *,
    zeros_if_idle: bool = True,
) -> tuple[Float[Array, "rows d_out"], ...]:
    """lora_gemm of several maps of the same rows: as few launches as may be.

    Tables are of one site, or of all with the modules' own `sites` named. What tensor cores do not
    take goes row by row.
    """
    places, pools = sites or [0] * len(modules), (x, a_pool, b_pool)
    widths = x.shape[1], value_width(b_pool.shape[1], b_pool.dtype)
    owners, in_8_bits = (row_to_slot, row_to_expert), b_pool.dtype == jnp.int8
    if any(_one_by_one(y, x, widths, max_rank) for y, *_ in modules):
        ys = [jnp.zeros((len(x), widths[1]), x.dtype) if y is None else y for y, *_ in modules]
        tables = [(entries, scaling) for _, entries, scaling in modules]
        return lora_rows.lora_rows(ys, tables, places, *pools, *owners, max_rank)
    slots, sorted_rows = modules[0][1].shape[-2], x.shape[0] if items is None else 1
    for y, entries, _ in modules:
        dtype = x.dtype if y is None else y.dtype
        check_support(dtype, sorted_rows, widths, entries.shape[-2], max_rank)
    ffi.require()
    work_list = row_items(*owners, slots, max_rank) if items is None else items
    launches = [slice(i, i + MAX_MODULES) for i in range(0, len(modules), MAX_MODULES)]
    if in_8_bits:  # whose kernels take all rows by items
        arrays = work_list.order, work_list.items, work_list.num_items
        done = (
            lora_int8.lora_int8(modules[i], *pools, *arrays, max_rank, places[i]) for i in launches
        )
    else:
        pairs = functools.partial(lora_pairs, zeros_if_idle=zeros_if_idle)
        done = (pairs(modules[i], *pools, work_list, max_rank, places[i]) for i in launches)
    made = tuple(y for ys in done for y in ys)
    if modules[0][0] is not None or in_8_bits or not _leaves_gaps(items):
        return made
    has_adapter = (row_to_slot >= 0) & (row_to_slot < slots)
    return tuple(jnp.where(has_adapter[:, None], y, 0) for y in made)


def _leaves_gaps(items: AdapterItems | None) -> bool:
    """Return whether rows without an adapter stand among tiles, whose launch zeros those behind.

    Experts' rows do, which stay in the order of experts. They have tiles at ranks above 32 where an
    adapter's runs are long (`reroute._tiles_of`).
    """
    return items is not None and items.in_order and items.tiles is not None


def _one_by_one(y: Array | None, x: Array, widths: tuple[int, int], max_rank: int) -> bool:
    """Return whether rows are for lora_rows, which have other dtypes, widths or ranks than here."""
    wide = jnp.float32 in (x.dtype, None if y is None else y.dtype)
    return wide or any(width % COLUMNS for width in widths) or max_rank > MAX_RANK


def lora_pair(
    y: Float[Array, "rows d_out"] | None,
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    items: CudaWorkList | AdapterItems,
    max_rank: int,
) -> Float[Array, "rows d_out"]:
    """Shrink and expand, in one launch but for tiles, for rows whose items are known."""
    return lora_pairs([(y, entries, scaling)], x, a_pool, b_pool, items, max_rank)[0]


def lora_pairs(
    modules: Sequence[Module],
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    items: CudaWorkList | AdapterItems,
    max_rank: int,
    sites: Sequence[int] | None = None,
    *,
    zeros_if_idle: bool = True,
) -> Sequence[Float[Array, "rows d_out"]]:
    """lora_pair of several maps of the same x, out of the same pools, in one launch.

    `sites` and `zeros_if_idle` as for lora_gemms: the kernel finds its part of a table, where
    cutting it out is a copy.

    Raises ValueError for no modules, for more than MAX_MODULES, and where only some y are None.
    """
    if not 1 <= len(modules) <= MAX_MODULES:
        raise ValueError(f"a launch takes 1 to {MAX_MODULES} modules, not {len(modules)}")
    accumulate = modules[0][0] is not None
    if any((y is not None) != accumulate for y, _, _ in modules):
        raise ValueError("a launch adds to every module's y or to none: some are None")
    slots = modules[0][1].shape[-2]
    small = are_small(items, len(x), slots, max_rank)
    segments, last = False, not lora_tiles.expects_tiles(len(x), slots)
    if isinstance(items, AdapterItems):
        last = last and not items.in_order  # else they are experts' rows, for which tiles pay
        runs = items.most_runs if items.in_order and items.tiles is None else None
        segments = accumulate and are_segments(len(items.items), max_rank, runs)
        arrays = items.order, items.items, items.num_items, items.tiles
        items = CudaWorkList(*arrays, shrinks_tiles=items.tiles is not None)
    listed = items.arrays
    count, parts = len(modules), 2 if listed[3].size else 1  # of items, and of tiles
    work = jax.ShapeDtypeStruct((parts * count, *_h_shape(x.shape[0], max_rank).shape), x.dtype)
    out = jax.ShapeDtypeStruct((x.shape[0], b_pool.shape[1]), x.dtype)
    shapes = [work, *[out] * count]
    aliases = {8 + 3 * m: 1 + m for m in range(count if accumulate else 0)}
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_gemm", shapes, input_output_aliases=aliases)
    operands = (v for m in modules for v in m if v is not None)
    kind = {"small_items": small, "segments": segments, "tiles_last": last}
    attributes = {"max_rank": np.int64(max_rank), "zeros_if_idle": zeros_if_idle, **kind}
    attributes["accumulate"] = accumulate
    places = np.array(sites or [0] * count, np.int64)
    return call(x, a_pool, b_pool, *listed, *operands, sites=places, **attributes)[1:]


def are_small(
    items: CudaWorkList | AdapterItems, rows: int, num_slots: int | None, max_rank: int
) -> bool:
    """Return whether no item has more than SMALL_ITEM rows, for a launch with this max_rank."""
    if isinstance(items, AdapterItems):
        if items.in_order:  # of experts
            return rows <= FEW_ROWS
        # By which they were cut, whatever tables this launch has.
        max_rank, num_slots = items.max_rank or MAX_RANK, items.most_runs
    return rows_per_item(rows, max_rank, num_slots=num_slots) <= SMALL_ITEM


def lora_shrink(
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    items: CudaWorkList,
    max_rank: int,
) -> Float[Array, "rows h_columns"]:
    """h[i, j] = s * x[order[i]] . A[j], zero for j from the rank up to the next multiple of 8.

    What lies beyond that, or in rows of no item, is undefined.
    """
    by_items = max_rank <= lora_tiles.ITEMS_RANK
    arrays = items.untiled_arrays if by_items else items.tiled_arrays
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_shrink", _h_shape(x.shape[0], max_rank))
    return call(x, a_pool, entries, scaling, *arrays)


def lora_expand(
    y: Float[Array, "rows d_out"] | None,
    h: Float[Array, "rows h_columns"],
    b_pool: Float[Array, "b_rows d_out"],
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    items: CudaWorkList,
) -> Float[Array, "rows d_out"]:
    """y[order[i]] + sum_j h[i, j] B[j] for h as lora_shrink gives it.

    Without y the sum alone, whose rows are read from nowhere: zero where there is no adapter.
    """
    ys = () if y is None else (y,)
    out = jax.ShapeDtypeStruct((h.shape[0], b_pool.shape[1]), h.dtype)
    aliases = {9: 0} if ys else {}
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_expand", out, input_output_aliases=aliases)
    return call(h, b_pool, entries, scaling, *items.tiled_arrays, *ys, accumulate=bool(ys))


def _h_shape(rows: int, max_rank: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, -(-max_rank // 8) * 8), jnp.bfloat16)
