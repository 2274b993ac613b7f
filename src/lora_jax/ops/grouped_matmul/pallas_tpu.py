"""x times one matrix per group of rows on a TPU: a Pallas kernel over (tile of rows, group).

The grid walks blocks of columns, then items (the rows of one group in one tile of rows), then
blocks of d_in. Which tile and which matrix an item takes is read by scalar prefetch, so matrices of
empty groups are never read, and one that serves several tiles of rows is read once where a block
holds all of d_in. Sums over d_in run in an order that depends on the widths alone.

A gated product takes a block of x to the blocks of two matrices at once; addends and activation are
applied to the sums in VMEM, by composed's own functions, so that neither product is written.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lora_jax.ops.dispatch import Declined
from lora_jax.ops.grouped_matmul.composed import plus, silu_times
from lora_jax.ops.row_items import places, row_items
from lora_jax.typing import Array, Float, Int

LANES = 128
MAX_K_BLOCK = 4096  # columns of x in VMEM
WEIGHT_BYTES = 4 << 20  # of one block of a matrix: its transfer hides a step's fixed cost
MAX_TILE = 512  # rows of a tile: more than enough work per byte of a matrix
MAX_ROWS = 1 << 16  # their items must fit into SMEM
ROW_BLOCK = 16  # rows whose sums become results at once: a tile of either dtype
VMEM_BYTES = 80 << 20  # of 128 MiB on v5e and v6e, without what the compiler takes for itself


@dataclasses.dataclass(frozen=True)
class _Operands:
    """Static inputs of a call besides x."""

    itemsize: int
    matrices: int  # 1, or gate and up
    biased: bool
    addends: tuple[int, ...]  # bytes of an element of each matrix's addend; 0: none


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Static sizes: rows, columns and summands of a step; steps over the last two."""

    tile: int
    columns: int
    depth: int
    column_blocks: int
    depth_blocks: int

    def vmem_bytes(self, operands: _Operands) -> int:
        """Bytes of all blocks, twice each, of the sums, and of the factors' parts if float32."""
        n, itemsize, area = operands.matrices, operands.itemsize, self.tile * self.columns
        factors = self.depth * (self.tile + n * self.columns) * itemsize
        results = area * (itemsize + sum(operands.addends))
        # The highest precision multiplies factors in three parts of bfloat16, put together again.
        return 2 * (factors + results) + n * area * 4 + (2 * factors if itemsize == 4 else 0)


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_out d_in"],
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
    addend: Float[Array, "rows d_out"] | None = None,
    *,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> Float[Array, "rows d_out"]:
    """Same result as composed; reads the matrices of groups that have rows, no others.

    `interpret` None runs on a TPU only; parameters run the kernel interpreted on any device, and
    False compiles it for the target at hand.

    Raises:
        Declined: not on a TPU; d_in is no multiple of 128; no rows or too many.
    """
    return _launch("grouped_matmul", x, (w,), group_sizes, bias, (addend,), interpret)


def gated_matmul(
    x: Float[Array, "rows d_in"],
    w_gate: Float[Array, "groups d_out d_in"],
    w_up: Float[Array, "groups d_out d_in"],
    group_sizes: Int[Array, "groups"],
    gate_addend: Float[Array, "rows d_out"] | None = None,
    up_addend: Float[Array, "rows d_out"] | None = None,
    *,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> Float[Array, "rows d_out"]:
    """Same result as composed, in one launch that reads x once for both; else as grouped_matmul."""
    weights, addends = (w_gate, w_up), (gate_addend, up_addend)
    return _launch("gated_matmul", x, weights, group_sizes, None, addends, interpret)


def _launch(
    op: str,
    x: Float[Array, "rows d_in"],
    weights: tuple[Float[Array, "groups d_out d_in"], ...],
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
    addends: tuple[Float[Array, "rows d_out"] | None, ...],
    interpret: pltpu.InterpretParams | bool | None,
) -> Float[Array, "rows d_out"]:
    """Return the op's result, or decline it."""
    rows, (groups, d_out, d_in) = x.shape[0], weights[0].shape
    if interpret is None and jax.default_backend() != "tpu":
        raise Declined(f"{op}: the TPU kernel runs on a TPU only")
    if d_in % LANES or not 0 < rows <= MAX_ROWS:
        raise Declined(
            f"{op}: {rows} rows of width {d_in}; the TPU kernel takes 1 to {MAX_ROWS} rows of a "
            f"multiple of {LANES}"
        )
    added = tuple(0 if a is None else a.dtype.itemsize for a in addends)
    operands = _Operands(x.dtype.itemsize, len(weights), bias is not None, added)
    blocks = _blocks(rows, groups, d_out, d_in, operands)
    table = _items(group_sizes, rows, blocks.tile)
    given = [a for a in addends if a is not None]
    biases = [] if bias is None else [bias[:, None]]
    return _call(op, x, weights, biases, given, table, blocks, operands, interpret or False)


def _blocks(rows: int, groups: int, d_out: int, d_in: int, operands: _Operands) -> _Blocks:
    """Return block sizes: tiles as long as groups are on average, matrices in a few MiB."""
    per_group = max(1, rows // groups)
    tile = min(MAX_TILE, max(ROW_BLOCK, 1 << (per_group - 1).bit_length()))
    lanes = d_in // LANES
    depth = max(n for n in range(1, MAX_K_BLOCK // LANES + 1) if lanes % n == 0) * LANES

    def cut(most: int) -> _Blocks:
        columns = d_out if d_out <= most else max(LANES, most // LANES * LANES)
        return _Blocks(tile, columns, depth, pl.cdiv(d_out, columns), d_in // depth)

    blocks = cut(WEIGHT_BYTES // (depth * operands.itemsize))
    while blocks.vmem_bytes(operands) > VMEM_BYTES and blocks.columns > LANES:
        blocks = cut(blocks.columns // 2)
    return blocks


def _items(group_sizes: Int[Array, "groups"], rows: int, tile: int) -> tuple[Array, ...]:
    """Return (counts, start, end, group) of items, rows in no group being a group of their own.

    counts: items, and rows that are in a group. The rows in no group name the last group that has
    rows, whose matrix is at hand.
    """
    groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    used = group_sizes > 0
    begins = jnp.zeros((rows,), bool).at[jnp.where(used, ends - group_sizes, rows)].set(True)
    begins = begins.at[ends[-1]].set(True)
    items = row_items(begins, jnp.int32(rows), tile)
    last = jnp.maximum(jnp.sum(used, dtype=jnp.int32) - 1, 0)
    group = jnp.minimum(places(used, 0)[jnp.minimum(items.segment, last)], groups - 1)
    return jnp.stack([items.num_items, ends[-1]]), items.start, items.end, group


def _call(
    op: str,
    x: Float[Array, "rows d_in"],
    weights: tuple[Float[Array, "groups d_out d_in"], ...],
    biases: list[Float[Array, "groups 1 d_out"]],
    addends: list[Float[Array, "rows d_out"]],
    table: tuple[Array, ...],
    blocks: _Blocks,
    operands: _Operands,
    interpret: pltpu.InterpretParams | bool,
) -> Float[Array, "rows d_out"]:
    """Return the results of all items; biases are one or none, addends those that are given."""
    tile, columns, depth = blocks.tile, blocks.columns, blocks.depth
    x_map = lambda n, i, k, counts, start, *_: (start[i] // tile, k)  # noqa: E731
    y_map = lambda n, i, k, counts, start, *_: (start[i] // tile, n)  # noqa: E731
    w_map = lambda n, i, k, counts, start, end, group: (group[i], n, k)  # noqa: E731
    bias_map = lambda n, i, k, counts, start, end, group: (group[i], 0, n)  # noqa: E731
    y_block = pl.BlockSpec((tile, columns), y_map)
    in_specs = [
        pl.BlockSpec((tile, depth), x_map),
        *[pl.BlockSpec((1, columns, depth), w_map)] * len(weights),
        *[pl.BlockSpec((1, 1, columns), bias_map)] * len(biases),
        *[y_block] * len(addends),
    ]
    return pl.pallas_call(
        functools.partial(_grouped_matmul_kernel, blocks, operands),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], weights[0].shape[1]), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table),
            grid=(blocks.column_blocks, table[0][0], blocks.depth_blocks),
            in_specs=in_specs,
            out_specs=y_block,
            scratch_shapes=[pltpu.VMEM((tile, columns), jnp.float32)] * len(weights),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            vmem_limit_bytes=blocks.vmem_bytes(operands) + (16 << 20),
        ),
        interpret=interpret,
        name=op,
    )(*table, x, *weights, *biases, *addends)


def _grouped_matmul_kernel(
    blocks: _Blocks, operands: _Operands, counts_ref, start_ref, end_ref, group_ref, x_ref, *refs
):
    del group_ref  # the matrices' blocks are chosen by it
    matrices, given = operands.matrices, iter(refs)
    w_refs = [next(given) for _ in range(matrices)]
    bias_ref = next(given) if operands.biased else None
    addend_refs = [next(given) if size else None for size in operands.addends]
    out_ref, *sum_refs = given
    i, k = pl.program_id(1), pl.program_id(2)
    start, end = start_ref[i], end_ref[i]
    tile_start = start // blocks.tile * blocks.tile
    in_group = start < counts_ref[1]

    @pl.when((k == 0) & (start == tile_start))
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when((k == 0) & in_group)
    def _():
        for sum_ref in sum_refs:
            sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(in_group)
    def _():
        precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
        dims = (((1,), (1,)), ((), ()))
        for w_ref, sum_ref in zip(w_refs, sum_refs, strict=True):
            sum_ref[...] += jax.lax.dot_general(
                x_ref[...], w_ref[0], dims, precision, preferred_element_type=jnp.float32
            )

    def linear(sum_ref, addend_ref, at):
        z = sum_ref[at, :]
        if bias_ref is not None:
            z = z + bias_ref[0].astype(jnp.float32)
        z = z.astype(out_ref.dtype)
        return z if addend_ref is None else plus(z, addend_ref[at, :])

    @pl.when((k == blocks.depth_blocks - 1) & in_group)
    def _():
        first, last = (start - tile_start) // ROW_BLOCK, pl.cdiv(end - tile_start, ROW_BLOCK)

        @pl.loop(first, last)
        def _(r):
            at = pl.ds(pl.multiple_of(r * ROW_BLOCK, ROW_BLOCK), ROW_BLOCK)
            ys = [linear(*refs, at) for refs in zip(sum_refs, addend_refs, strict=True)]
            y = silu_times(*ys) if len(ys) == 2 else ys[0]
            row = (
                jax.lax.broadcasted_iota(jnp.int32, (ROW_BLOCK, 1), 0) + r * ROW_BLOCK + tile_start
            )
            out_ref[at, :] = jnp.where((row >= start) & (row < end), y, out_ref[at, :])
