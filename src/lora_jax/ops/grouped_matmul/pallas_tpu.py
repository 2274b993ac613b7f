"""x times one matrix per group of rows on a TPU: a Pallas kernel over (tile of rows, group).

The grid walks blocks of columns, then items (the rows of one group in one tile of rows), then
blocks of d_in. Which tile and which matrix an item takes is read by scalar prefetch, so matrices of
empty groups are never read, and one that serves several tiles of rows is read once where a block
holds all of d_in. Sums over d_in run in an order that depends on the widths alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lora_jax.ops.row_items import places, row_items
from lora_jax.typing import Array, Float, Int

LANES = 128
MAX_K_BLOCK = 4096  # columns of x in VMEM
WEIGHT_BYTES = 4 << 20  # of one block of a matrix: its transfer hides a step's fixed cost
MAX_TILE = 512  # rows of a tile: more than enough work per byte of a matrix
MAX_ROWS = 1 << 16  # their items must fit into SMEM


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Static sizes: rows, columns and summands of a step; steps over the last two."""

    tile: int
    columns: int
    depth: int
    column_blocks: int
    depth_blocks: int

    def vmem_bytes(self, itemsize: int) -> int:
        """Bytes of the blocks of x, w and y, twice each, and of the sum."""
        blocks = self.tile * self.depth + self.columns * (self.depth + self.tile)
        return 2 * blocks * itemsize + self.tile * self.columns * 4


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_out d_in"],
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
    *,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> Float[Array, "rows d_out"]:
    """What the reference says; reads the matrices of groups that have rows, and only those.

    `interpret` None runs on a TPU only; parameters run the kernel interpreted on any device, and
    False compiles it for the target at hand.

    Raises:
        NotImplementedError: not on a TPU; d_in is no multiple of 128; no rows or too many.
    """
    rows, (groups, d_out, d_in) = x.shape[0], w.shape
    if interpret is None and jax.default_backend() != "tpu":
        raise NotImplementedError("grouped_matmul: the TPU kernel runs on a TPU only")
    if d_in % LANES or not 0 < rows <= MAX_ROWS:
        raise NotImplementedError(
            f"grouped_matmul: {rows} rows of width {d_in}; the TPU kernel takes 1 to {MAX_ROWS} "
            f"rows of a multiple of {LANES}"
        )
    blocks = _blocks(rows, groups, d_out, d_in, x.dtype.itemsize)
    table = _items(group_sizes, rows, blocks.tile)
    bias = jnp.zeros((groups, 0), x.dtype) if bias is None else bias
    return _call(x, w, bias[:, None], table, blocks, interpret or False)


def _blocks(rows: int, groups: int, d_out: int, d_in: int, itemsize: int) -> _Blocks:
    """Return block sizes: tiles as long as groups are on average, matrices in a few MiB."""
    per_group = max(1, rows // groups)
    tile = min(MAX_TILE, max(16, 1 << (per_group - 1).bit_length()))
    lanes = d_in // LANES
    depth = max(n for n in range(1, MAX_K_BLOCK // LANES + 1) if lanes % n == 0) * LANES
    columns = d_out
    if d_out * depth * itemsize > WEIGHT_BYTES:
        columns = min(d_out, max(LANES, WEIGHT_BYTES // (depth * itemsize) // LANES * LANES))
    return _Blocks(tile, columns, depth, pl.cdiv(d_out, columns), d_in // depth)


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
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_out d_in"],
    bias: Float[Array, "groups 1 width"],
    table: tuple[Array, ...],
    blocks: _Blocks,
    interpret: pltpu.InterpretParams | bool,
) -> Float[Array, "rows d_out"]:
    """Return the products of all items; a bias of width 0 is none."""
    tile, columns, depth = blocks.tile, blocks.columns, blocks.depth
    with_bias = bias.shape[2] > 0
    x_map = lambda n, i, k, counts, start, *_: (start[i] // tile, k)  # noqa: E731
    w_map = lambda n, i, k, counts, start, end, group: (group[i], n, k)  # noqa: E731
    bias_map = lambda n, i, k, counts, start, end, group: (group[i], 0, n)  # noqa: E731
    in_specs = [pl.BlockSpec((tile, depth), x_map), pl.BlockSpec((1, columns, depth), w_map)]
    return pl.pallas_call(
        functools.partial(_grouped_matmul_kernel, blocks, with_bias),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table),
            grid=(blocks.column_blocks, table[0][0], blocks.depth_blocks),
            in_specs=[*in_specs, *[pl.BlockSpec((1, 1, columns), bias_map)] * with_bias],
            out_specs=pl.BlockSpec(
                (tile, columns), lambda n, i, k, counts, start, *_: (start[i] // tile, n)
            ),
            scratch_shapes=[pltpu.VMEM((tile, columns), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            vmem_limit_bytes=blocks.vmem_bytes(x.dtype.itemsize) + (16 << 20),
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(*table, x, w, *[bias] * with_bias)


def _grouped_matmul_kernel(
    blocks: _Blocks, with_bias: bool, counts_ref, start_ref, end_ref, group_ref, x_ref, w_ref, *refs
):
    del group_ref  # the matrices' blocks are chosen by it
    bias_ref, (out_ref, sum_ref) = (refs[0] if with_bias else None), refs[-2:]
    i, k = pl.program_id(1), pl.program_id(2)
    start, end = start_ref[i], end_ref[i]
    tile_start = start // blocks.tile * blocks.tile
    in_group = start < counts_ref[1]

    @pl.when((k == 0) & (start == tile_start))
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when((k == 0) & in_group)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(in_group)
    def _():
        precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
        dims = (((1,), (1,)), ((), ()))
        sum_ref[...] += jax.lax.dot_general(
            x_ref[...], w_ref[0], dims, precision, preferred_element_type=jnp.float32
        )

    @pl.when((k == blocks.depth_blocks - 1) & in_group)
    def _():
        z = sum_ref[...]
        if bias_ref is not None:
            z = z + bias_ref[0].astype(jnp.float32)
        row = jax.lax.broadcasted_iota(jnp.int32, (blocks.tile, 1), 0) + tile_start
        mine = (row >= start) & (row < end)
        out_ref[...] = jnp.where(mine, z.astype(out_ref.dtype), out_ref[...])
