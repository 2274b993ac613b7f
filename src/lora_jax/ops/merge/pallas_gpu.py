"""Merges adapters into weights on a Hopper GPU: one Mosaic launch over all matrices, in place.

A CTA walks down some rows of a block of columns, whose part of A stays in shared memory. One
warpgroup has the copy engine bring tiles of w and B's part of them into a ring; the others take
turns in adding the product to a tile and have it taken out again, so that bytes on their way depend
on shared memory alone. Columns of B are wgmma's M operand, A's its N, rank rows its K.

Rank rows begin anywhere in their pools, what is copied in the tiles that wgmma reads at multiples
of 8: A's are copied otherwise and laid out once for all tiles, B's go through registers. Rows
behind them, which may hold NaN, become zeros on that way.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops import hopper
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int

MAX_RANK = 128
ALIGN = 8  # rows of w: B's rows are copied in pieces of 16 bytes
ROWS = 64  # of w in a tile: wgmma's M
WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class MergeConfig:
    """Tiles of the launch, chosen while tracing."""

    columns: int = 256  # of w in one tile
    part: int = 128  # of those, summed at once
    warpgroups: int = 2  # that multiply
    slots: int = 2  # tiles of each that are on their way or worked on: two at least
    unit_rows: int = 512  # that a CTA works through; 256 and 1024 take 2% more on an H200


def merge(
    w: Float[Array, "matrices d_out d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    sites: Int[Array, "matrices 3"],
    scaling: Float[Array, "matrices"],
    max_rank: int,
    *,
    config: MergeConfig | None = None,
    interpret: hopper.Interpret = None,
) -> Float[Array, "matrices d_out d_in"]:
    """Same result as the reference; products of bfloat16, sums in float32, one rounding.

    `interpret`: see hopper.require. Raises Declined for another machine or dtype, no
    matrices, a d_out that is no multiple of 8, a d_in that is none of 64, and ranks above 128.
    """
    _require(w, max_rank, interpret)
    config = config or find_config(max_rank)
    return _merge(w, a_pool, b_pool, sites, scaling, _padded(max_rank), config, interpret)


def find_config(max_rank: int) -> MergeConfig:
    """Return tiles for ranks to `max_rank`."""
    return MergeConfig() if max_rank <= hopper.COLUMNS else MergeConfig(columns=128)


def _require(w: Array, max_rank: int, interpret: hopper.Interpret) -> None:
    """Raise Declined, saying why, for what the kernel does not serve."""
    hopper.require("merge", w.dtype, interpret)
    matrices, d_out, d_in = w.shape
    if 0 in w.shape or d_out % ALIGN or d_in % hopper.COLUMNS:
        raise Declined(
            f"merge on Mosaic GPU takes matrices in steps of {ALIGN} x {hopper.COLUMNS}, not "
            f"{matrices} of {d_out} x {d_in}"
        )
    if max_rank > MAX_RANK:
        raise Declined(f"merge on Mosaic GPU takes ranks to {MAX_RANK}, not {max_rank}")


def _padded(max_rank: int) -> int:
    """Return how many rank rows a product has: whole rows of swizzled memory."""
    return -(-max_rank // hopper.COLUMNS) * hopper.COLUMNS


# Equal launches of a program's layers are traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnames=("padded", "config", "interpret"))
def _merge(
    w: Float[Array, "matrices d_out d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    sites: Int[Array, "matrices 3"],
    scaling: Float[Array, "matrices"],
    padded: int,
    config: MergeConfig,
    interpret: hopper.Interpret,
) -> Float[Array, "matrices d_out d_in"]:
    """Return the merged matrices, in place if w is a temporary."""
    matrices, d_out, d_in = w.shape
    chunks, parts = pl.cdiv(d_in, config.columns), pl.cdiv(d_out, config.unit_rows)
    stages, columns = config.warpgroups * config.slots, config.columns
    kernel = plgpu.kernel(
        _merge_body(config, d_out, chunks, parts, bool(interpret)),
        out_type=(),
        grid=(matrices * parts * chunks,),
        grid_names=("unit",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((columns // config.part, padded, config.part), w.dtype),
            plgpu.SMEM((padded, columns), w.dtype),
            plgpu.SMEM((stages, padded, ROWS), w.dtype),
            plgpu.SMEM((stages, ROWS, columns), w.dtype),
            plgpu.Barrier(num_arrivals=columns // config.part),
            plgpu.Barrier(num_arrivals=config.warpgroups),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
        interpret=interpret or False,
    )
    w_ref = jax.new_ref(w)
    kernel(sites, scaling, a_pool, b_pool, w_ref)
    return w_ref[...]


def _merge_body(config: MergeConfig, d_out: int, chunks: int, parts: int, interpreted: bool):
    """Return the kernel: a unit is some rows of a block of columns.

    Units side by side follow one another, so that CTAs that run together share pages of memory.
    """
    columns, warpgroups = config.columns, config.warpgroups
    stages = warpgroups * config.slots
    column_parts = [pl.ds(first, config.part) for first in range(0, columns, config.part)]

    def _merge_kernel(sites_ref, scaling_ref, a_ref, b_ref, w_ref, *scratch):
        a_rows, a_smem, b_smem, w_smem, a_full, a_ready, full, empty = scratch
        unit, warpgroup = lax.axis_index("unit"), lax.axis_index("warpgroup")
        column = pl.multiple_of(lax.rem(unit, jnp.int32(chunks)) * columns, columns)
        above = lax.div(unit, jnp.int32(chunks))
        begin = lax.rem(above, jnp.int32(parts)) * config.unit_rows
        matrix = lax.div(above, jnp.int32(parts))
        rows = lax.min(d_out - begin, jnp.int32(config.unit_rows))
        tiles = lax.div(rows + (ROWS - 1), jnp.int32(ROWS))
        rank = sites_ref[matrix, 2]

        def place(tile):
            """Return the tile's first row, where it is in w, and its slot."""
            row = pl.multiple_of(begin + tile * ROWS, ROWS)
            source = w_ref.at[matrix, pl.ds(row, ROWS), pl.ds(column, columns)]
            return row, source, lax.rem(tile, jnp.int32(stages))

        @pl.when((rank > 0) & (warpgroup == warpgroups))
        def _copy():
            # A buffer each: a slice would be read as if its bytes were swizzled from its own begin.
            for i, part in enumerate(column_parts):
                rows = pl.ds(sites_ref[matrix, 0], a_smem.shape[0])
                source = a_ref.at[rows, pl.ds(column + part.start, part.size)]
                plgpu.copy_gmem_to_smem(source, a_rows.at[i], a_full)

            def one(tile, _):
                row, source, at = place(tile)

                @pl.when(tile >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[at])

                plgpu.copy_gmem_to_smem(source, w_smem.at[at], full.at[at])
                rows = pl.ds(sites_ref[matrix, 1], b_smem.shape[1])
                source = b_ref.at[rows, pl.ds(row, ROWS)]
                plgpu.copy_gmem_to_smem(source, b_smem.at[at], full.at[at])

            lax.fori_loop(0, tiles, one, None)

            def drain(tile, _):
                plgpu.barrier_wait(empty.at[lax.rem(tile, jnp.int32(stages))])

            lax.fori_loop(lax.max(tiles - stages, jnp.int32(0)), tiles, drain, None)

        def own_rows(rows, axis: int):
            """Return rank rows, zeros in place of others' behind them: NaN times 0 is NaN."""
            index = plgpu.broadcasted_iota(jnp.int32, rows.shape, axis, layout=WGMMA)
            return jnp.where(index < rank, rows, jnp.zeros_like(rows))

        @pl.when((rank > 0) & (warpgroup < warpgroups))
        def _multiply():
            scale = scaling_ref[matrix]
            plgpu.barrier_wait(a_full)

            def lay_out(i, part):
                rows = plgpu.load(a_rows.at[i], layout=WGMMA, optimized=False)
                a_smem[:, part] = own_rows(rows, 0)

            for i, part in enumerate(column_parts):
                pl.when(warpgroup == i % warpgroups)(functools.partial(lay_out, i, part))
            plgpu.commit_smem()
            plgpu.barrier_arrive(a_ready)
            plgpu.barrier_wait(a_ready)

            def leave(tile):
                """Give back the slot of a tile that has been taken out."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(empty.at[lax.rem(tile, jnp.int32(stages))])

            def one(j, _):
                tile = j * warpgroups + warpgroup
                _, target, at = place(tile)
                plgpu.barrier_wait(full.at[at])
                pl.when(j > 0)(lambda: leave(tile - warpgroups))
                b_t = b_smem.at[at].transpose((1, 0))
                b = own_rows(plgpu.load(b_t, layout=WGMMA, optimized=False), 1)
                if interpreted:  # which has no operands in registers
                    b_t[...] = b
                    plgpu.commit_smem()
                for part in column_parts:

                    def scope(acc, part=part):
                        plgpu.wgmma(acc, b_t if interpreted else b, a_smem.at[:, part])
                        plgpu.wgmma_wait(0)
                        return acc[...]

                    one = plgpu.WGMMAAccumulatorRef((ROWS, config.part), jnp.float32)
                    delta = pl.run_scoped(scope, one)
                    old = plgpu.load(w_smem.at[at, :, part], layout=WGMMA)
                    new = old.astype(jnp.float32) + scale * delta
                    w_smem[at, :, part] = new.astype(w_ref.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(w_smem.at[at], target)

            num_tiles = lax.div(tiles - warpgroup + (warpgroups - 1), jnp.int32(warpgroups))
            lax.fori_loop(0, num_tiles, one, None)
            pl.when(num_tiles > 0)(lambda: leave((num_tiles - 1) * warpgroups + warpgroup))
            plgpu.wait_smem_to_gmem(0)

    return _merge_kernel
