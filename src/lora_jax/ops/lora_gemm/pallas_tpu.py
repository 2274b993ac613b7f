"""Adds adapters to rows on a TPU: shrink and expand of sorted rows in one Pallas kernel.

Rows are sorted by (slot, expert) outside. The kernel walks items, each the rows of one segment in
one tile of rows. A segment's rank rows come from the pools in HBM by DMA, eight rows a copy, while
the segment before it is worked on; they are read once per segment (SGMV: Punica, section 4), and no
more of them than the segment's own rank. Offsets need not be aligned: a window that begins up to
seven rows early is read, and turned and masked in VMEM, so that neither the place in the pool nor
what lies around it changes a bit. Sums run over d_in and rank in one fixed order.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lora_jax.ops.dispatch import Declined
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.ops.row_items import TileList, row_items
from lora_jax.typing import Array, Float, Int

LANES = 128
ALIGN = 8  # rows that one DMA must begin at and consist of
K_BLOCK = 1024  # columns of one step of the sum over d_in
COLUMN_BLOCK = 512  # columns of y worked on at once
MAX_TILE = 128  # rows of a tile
ROW_BLOCK = 32  # rows worked on at once
MAX_ROWS = 8192  # rows of one call: their items must fit into SMEM
OUT_BYTES = 32 << 10  # of one row of the block of y that is held in VMEM
VMEM_BYTES = 96 << 20  # v5e and v6e have 128 MiB


@dataclasses.dataclass(frozen=True)
class _LoraGemmSizes:
    """Static sizes of one call."""

    tile: int  # rows of x and y in VMEM
    row_block: int
    window: int  # rank rows in VMEM, with those that alignment adds
    ranks: int  # max_rank, rounded up to whole tiles of any dtype
    d_in: int
    d_out: int
    columns: int  # of y held in VMEM
    itemsize: int

    @property
    def column_blocks(self) -> int:
        return pl.cdiv(self.d_out, self.columns)

    @property
    def h_lanes(self) -> int:
        return _round_up(self.window, LANES)

    @property
    def vmem_bytes(self) -> int:
        """Bytes of all buffers, blocks of x and y twice."""
        x_and_y = self.tile * (2 * self.d_in + 4 * self.columns)
        windows = 2 * self.window * (self.d_in + self.columns) + self.ranks * self.columns
        return (x_and_y + windows) * self.itemsize + self.row_block * self.h_lanes * 4


def lora_gemm(
    y: Float[Array, "rows d_out"],
    batch: LoraBatch,
    *,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference; h is rounded to the dtype between shrink and expand.

    `interpret` None runs on a TPU only; parameters run the kernel interpreted on any device, and
    False compiles it for the target at hand.

    Raises:
        Declined: not on a TPU; widths that are no multiple of 128; pools whose rows are
            no multiple of 8; or more than VMEM holds.
    """
    if interpret is None and jax.default_backend() != "tpu":
        raise Declined("lora_gemm: the TPU kernel runs on a TPU only")
    x, a_pool, b_pool = batch.x, batch.a_pool, batch.b_pool
    entries, scaling, max_rank = batch.entries, batch.scaling, batch.max_rank
    row_to_slot, row_to_expert = batch.row_to_slot, batch.row_to_expert
    sizes = _sizes(y, x, a_pool, b_pool, max_rank)
    rows = x.shape[0]
    order = jnp.lexsort((row_to_expert, jnp.where(row_to_slot < 0, jnp.int32(2**30), row_to_slot)))
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(rows, dtype=order.dtype))
    order = jnp.pad(order, (0, -rows % min(MAX_ROWS, _round_up(rows, sizes.tile))))
    real = jnp.arange(order.shape[0], dtype=jnp.int32) < rows

    def one_part(part):
        rows, real = part
        slots = jnp.where(real, row_to_slot[rows], -1)
        table = _segments(entries, scaling, slots, row_to_expert[rows], sizes.tile)
        return _sorted_rows(y[rows], x[rows], a_pool, b_pool, table, sizes, interpret or False)

    if order.shape[0] <= MAX_ROWS:
        return one_part((order, real))[inverse]
    parts = (order.reshape(-1, MAX_ROWS), real.reshape(-1, MAX_ROWS))
    return jax.lax.map(one_part, parts).reshape(-1, sizes.d_out)[inverse]


def _sizes(y, x, a_pool, b_pool, max_rank: int) -> _LoraGemmSizes:
    """Return the sizes of a call, or decline it."""
    rows, d_in, d_out, itemsize = x.shape[0], x.shape[1], y.shape[1], x.dtype.itemsize
    if rows == 0 or d_in % LANES or d_out % LANES:
        raise Declined(
            f"lora_gemm: {rows} rows of widths {d_in} and {d_out}; the TPU kernel takes some rows "
            f"of multiples of {LANES}"
        )
    if a_pool.shape[0] % ALIGN or b_pool.shape[0] % ALIGN:
        raise Declined(
            f"lora_gemm: pools of {a_pool.shape[0]} and {b_pool.shape[0]} rows; the TPU kernel "
            f"takes multiples of {ALIGN}"
        )
    tile = min(MAX_TILE, max(16, 1 << (rows - 1).bit_length()))
    sizes = _LoraGemmSizes(
        tile=tile,
        row_block=min(ROW_BLOCK, tile),
        window=_round_up(max_rank + ALIGN - 1, 16),
        ranks=_round_up(max_rank, 16),
        d_in=d_in,
        d_out=d_out,
        columns=min(d_out, OUT_BYTES // itemsize),
        itemsize=itemsize,
    )
    if sizes.vmem_bytes > VMEM_BYTES:
        raise Declined(
            f"lora_gemm: rank {max_rank} of widths {d_in} and {d_out} takes {sizes.vmem_bytes} "
            f"bytes of VMEM, more than {VMEM_BYTES}"
        )
    return sizes


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _segments(
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    slot: Int[Array, "rows"],
    expert: Int[Array, "rows"],
    tile: int,
) -> tuple[Array, ...]:
    """Return what the kernel reads by scalar prefetch, for rows sorted by (slot, expert).

    (counts, start, end, segment) of items, then (a_row, b_row, rank, scaling) of segments.
    """
    changed = (slot[1:] != slot[:-1]) | (expert[1:] != expert[:-1])
    begins = jnp.pad(changed, (1, 0), constant_values=True)
    items: TileList = row_items(begins, jnp.sum(slot >= 0, dtype=jnp.int32), tile)
    of = jnp.minimum(items.segment_start, slot.shape[0] - 1)
    slot, expert = jnp.maximum(slot[of], 0), expert[of]
    a_row, b_row, rank, a_stride, b_stride = entries[slot].T
    a_row, b_row = a_row + expert * a_stride, b_row + expert * b_stride
    counts = jnp.stack([items.num_items, items.num_segments])
    return counts, items.start, items.end, items.segment, a_row, b_row, rank, scaling[slot]


def _sorted_rows(
    y: Float[Array, "rows d_out"],
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    table: tuple[Array, ...],
    sizes: _LoraGemmSizes,
    interpret: pltpu.InterpretParams | bool,
) -> Float[Array, "rows d_out"]:
    """Return y with adapters added, in place; rows are sorted by segment and fill whole tiles."""
    tile, columns, dtype = sizes.tile, sizes.columns, x.dtype
    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    y_block = pl.BlockSpec((tile, columns), lambda n, i, counts, start, *_: (start[i] // tile, n))
    x_block = pl.BlockSpec(
        (tile, sizes.d_in), lambda n, i, counts, start, *_: (start[i] // tile, 0)
    )
    return pl.pallas_call(
        functools.partial(_lora_gemm_kernel, sizes),
        out_shape=jax.ShapeDtypeStruct(y.shape, dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table),
            grid=(sizes.column_blocks, jnp.maximum(table[0][0], 1)),
            in_specs=[y_block, x_block, pool, pool],
            out_specs=y_block,
            scratch_shapes=[
                pltpu.VMEM((2, sizes.window, sizes.d_in), dtype),
                pltpu.VMEM((2, sizes.window, columns), dtype),
                pltpu.VMEM((sizes.ranks, columns), dtype),
                pltpu.VMEM((sizes.row_block, sizes.h_lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        input_output_aliases={len(table): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=sizes.vmem_bytes + (16 << 20),
        ),
        interpret=interpret,
        name="lora_gemm",
    )(*table, y, x, a_pool, b_pool)


def _lora_gemm_kernel(
    sizes: _LoraGemmSizes,
    counts_ref,
    start_ref,
    end_ref,
    segment_ref,
    a_row_ref,
    b_row_ref,
    rank_ref,
    scaling_ref,
    y_ref,
    x_ref,
    a_hbm_ref,
    b_hbm_ref,
    out_ref,
    a_ref,
    b_ref,
    b_turned_ref,
    h_ref,
    sems,
):
    n, i = pl.program_id(0), pl.program_id(1)
    num_segments = counts_ref[1]
    segment = segment_ref[i]
    rank = jnp.where(i < counts_ref[0], rank_ref[segment], 0)
    a_shift, b_shift = a_row_ref[segment] % ALIGN, b_row_ref[segment] % ALIGN
    slot = (n * num_segments + segment) % 2
    last_columns = sizes.d_out - (sizes.column_blocks - 1) * sizes.columns

    def for_each_copy(block, of, do):
        """Call do on each DMA of segment `of`'s rank rows, B's in this block of columns."""
        to = (block * num_segments + of) % 2

        def copies(pool_ref, row, buffer_ref, sem, column, width):
            first = row // ALIGN * ALIGN
            count = jnp.where(rank_ref[of] > 0, pl.cdiv(row - first + rank_ref[of], ALIGN), 0)

            @pl.loop(0, count)
            def _(c):
                source = pl.ds(pl.multiple_of(first + c * ALIGN, ALIGN), ALIGN)
                target = pl.ds(pl.multiple_of(c * ALIGN, ALIGN), ALIGN)
                source_ref = pool_ref.at[source, pl.ds(pl.multiple_of(column, LANES), width)]
                target_ref = buffer_ref.at[to, target, pl.ds(0, width)]
                do(pltpu.make_async_copy(source_ref, target_ref, sem))

        copies(a_hbm_ref, a_row_ref[of], a_ref, sems.at[to, 0], 0, sizes.d_in)
        b_copies = functools.partial(copies, b_hbm_ref, b_row_ref[of], b_ref, sems.at[to, 1])
        if last_columns == sizes.columns:
            b_copies(block * sizes.columns, sizes.columns)
        else:
            is_last = block == sizes.column_blocks - 1
            pl.when(is_last)(lambda: b_copies(sizes.d_out - last_columns, last_columns))
            pl.when(~is_last)(lambda: b_copies(block * sizes.columns, sizes.columns))

    has_items = counts_ref[0] > 0

    @pl.when((n == 0) & (i == 0) & has_items)
    def _():
        for_each_copy(n, segment, lambda copy: copy.start())

    first_of_segment = (i == 0) | (segment_ref[jnp.maximum(i - 1, 0)] != segment)

    @pl.when(first_of_segment & has_items)
    def _():
        wraps = segment + 1 == num_segments
        next_n, following = jnp.where(wraps, n + 1, n), jnp.where(wraps, 0, segment + 1)

        @pl.when(next_n < sizes.column_blocks)
        def _():
            for_each_copy(next_n, following, lambda copy: copy.start())

        for_each_copy(n, segment, lambda copy: copy.wait())
        _turn(b_ref.at[slot], b_turned_ref, b_shift, rank)

    tile_start = start_ref[i] // sizes.tile * sizes.tile

    @pl.when(start_ref[i] == tile_start)
    def _():
        out_ref[...] = y_ref[...]

    @pl.when(rank > 0)
    def _():
        block, begin, end = sizes.row_block, start_ref[i] - tile_start, end_ref[i] - tile_start

        @pl.loop(begin // block, pl.cdiv(end, block))
        def _(r):
            at = pl.ds(pl.multiple_of(r * block, block), block)
            _shrink(x_ref.at[at], a_ref.at[slot], h_ref, a_shift + rank)
            h = pltpu.roll(h_ref[...], jnp.where(a_shift == 0, 0, sizes.h_lanes - a_shift), axis=1)
            lane = jax.lax.broadcasted_iota(jnp.int32, h.shape, 1)
            h = jnp.where(lane < rank, h * scaling_ref[segment], jnp.float32(0))
            h = h[:, : sizes.ranks].astype(x_ref.dtype)
            row = jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) + r * block
            _expand(h, b_turned_ref, (row >= begin) & (row < end), out_ref.at[at])


def _for_blocks(width: int, block: int, do) -> None:
    """Call do(first column, columns) over `width` columns, in order."""
    whole = width // block

    @pl.loop(0, whole)
    def _(c):
        do(pl.multiple_of(c * block, LANES), block)

    if width % block:
        do(whole * block, width % block)


def _turn(b_ref, turned_ref, shift, rank) -> None:
    """Write the `rank` rows that begin at row `shift` of b_ref from row 0 on, then zeros."""
    window, ranks = b_ref.shape[0], turned_ref.shape[0]

    def columns(first, width):
        b = b_ref[:, pl.ds(first, width)].astype(jnp.float32)
        b = pltpu.roll(b, jnp.where(shift == 0, 0, window - shift), axis=0)[:ranks]
        row = jax.lax.broadcasted_iota(jnp.int32, b.shape, 0)
        b = jnp.where(row < rank, b, jnp.float32(0))
        turned_ref[:, pl.ds(first, width)] = b.astype(turned_ref.dtype)

    _for_blocks(b_ref.shape[1], COLUMN_BLOCK, columns)


def _shrink(x_ref, a_ref, h_ref, used) -> None:
    """Write x times the first `used` rows of the window of A to the lanes of h_ref; more is noise.

    128 rows of A at a time, so that what is not used costs nothing.
    """
    for row in range(0, a_ref.shape[0], LANES):
        rows = slice(row, min(row + LANES, a_ref.shape[0]))

        @pl.when(row < used)
        def _(rows=rows):
            h_ref[:, rows] = jnp.zeros((h_ref.shape[0], rows.stop - rows.start), jnp.float32)

            def block(first, width):
                at = pl.ds(first, width)
                h_ref[:, rows] += _dot(x_ref[:, at], a_ref[rows, at], contract=1)

            _for_blocks(a_ref.shape[1], K_BLOCK, block)


def _expand(h, b_ref, mine, out_ref) -> None:
    """Add h times B to the rows of out_ref that are `mine`, rounded once."""

    def columns(first, width):
        at = pl.ds(first, width)
        old = out_ref[:, at]
        new = old.astype(jnp.float32) + _dot(h, b_ref[:, at], contract=0)
        out_ref[:, at] = jnp.where(mine, new.astype(old.dtype), old)

    _for_blocks(out_ref.shape[1], COLUMN_BLOCK, columns)


def _dot(x, y, contract: int):
    """Return x times y over x's columns and y's axis `contract`, in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision, preferred_element_type=jnp.float32)
