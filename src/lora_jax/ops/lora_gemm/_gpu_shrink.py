"""x A^T of sorted rows: a persistent Mosaic kernel with rank rows as wgmma's M operand."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops import hopper
from lora_jax.ops.lora_gemm._gpu_schedule import (
    ALIGN,
    CTAS,
    DEPTH,
    TALL,
    LoraGemmConfig,
    LoraGemmSchedule,
)
from lora_jax.typing import Array, Float

PIECE = 1024  # of d_in, about, summed by one CTA


def _pieces(d_in: int) -> tuple[int, int]:
    """Return in how many parts d_in is summed, and the stages of each."""
    pieces = min(8, max(1, round(d_in / PIECE)))
    return pieces, pl.cdiv(pl.cdiv(d_in, pieces), DEPTH)


# Equal launches of a program's layers are traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnames=("max_rank", "config", "interpret"))
def shrink(
    x: Float[Array, "padded d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    schedule: LoraGemmSchedule,
    max_rank: int,
    config: LoraGemmConfig,
    interpret: hopper.Interpret,
) -> Float[Array, "pieces padded rank_rows"]:
    """Return parts[s, p, a_low + j] = x[p] . A[j] over piece s of d_in, for sorted rows x.

    What is no rank row of a row's adapter is undefined.
    """
    pieces, _ = _pieces(x.shape[1])
    tall_tiles = pl.cdiv(max_rank + ALIGN - 1, TALL)
    shape = (pieces, x.shape[0], tall_tiles * TALL)
    ctas = hopper.num_sms(interpret) * CTAS
    stages = config.shrink_stages
    kernel = plgpu.kernel(
        _shrink_body(config, x.shape[1], tall_tiles, ctas),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages, TALL, DEPTH), x.dtype),
            plgpu.SMEM((stages, config.rows, DEPTH), x.dtype),
            plgpu.SMEM((config.rows, TALL), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
        interpret=interpret or False,
    )
    return kernel(schedule.items, schedule.num_items, x, a_pool)


def _shrink_body(config: LoraGemmConfig, d_in: int, tall_tiles: int, ctas: int):
    """Return the kernel: works are items times pieces of d_in, then again for the next 64 ranks."""
    tile_rows, stages = config.rows, config.shrink_stages
    pieces, steps = _pieces(d_in)
    heights = (8, 16, 32, TALL)

    def _shrink_kernel(
        items_ref, num_ref, x_ref, a_ref, parts_ref, a_smem, x_smem, out, full, empty
    ):
        cta = lax.axis_index("cta")
        per_tile = num_ref[0] * pieces
        num_works = lax.div(per_tile * tall_tiles - cta + (ctas - 1), jnp.int32(ctas))

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        def for_each_work(do):
            """Call do(item, piece, tile of ranks, its height, step); return the last step."""

            def one(j, step):
                index = j * ctas + cta
                tall = lax.div(index, per_tile)
                rest = lax.rem(index, per_tile)
                item, piece = lax.div(rest, jnp.int32(pieces)), lax.rem(rest, jnp.int32(pieces))
                height = items_ref[item, 3] - tall * TALL

                @pl.when(height > 0)
                def _():
                    do(item, piece, tall, height, step)

                return step + jnp.where(height > 0, steps, 0)

            return lax.fori_loop(0, num_works, one, jnp.int32(0))

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _copy():
            def one(item, piece, tall, height, begin):
                rank_row = pl.multiple_of(items_ref[item, 0] + tall * TALL, ALIGN)
                row = pl.multiple_of(items_ref[item, 6], ALIGN)

                def stage(k, _):
                    at = slot(begin + k)
                    depth = pl.ds(pl.multiple_of((piece * steps + k) * DEPTH, DEPTH), DEPTH)

                    @pl.when(begin + k >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[at])

                    # Rows of x A^T do not mix: what a short copy leaves below it is not looked at.
                    for low, high in zip((0, *heights), heights, strict=False):
                        last = high == TALL

                        @pl.when((height > low) & ((height <= high) | last))
                        def _(high=high):
                            source = a_ref.at[pl.ds(rank_row, high), depth]
                            target = a_smem.at[at, pl.ds(0, high)]
                            plgpu.copy_gmem_to_smem(source, target, full.at[at])

                    source = x_ref.at[pl.ds(row, tile_rows), depth]
                    plgpu.copy_gmem_to_smem(source, x_smem.at[at], full.at[at])

                lax.fori_loop(0, steps, stage, None)

            copied = for_each_work(one)

            def drain(step, _):
                plgpu.barrier_wait(empty.at[slot(step)])

            lax.fori_loop(lax.max(copied - stages, jnp.int32(0)), copied, drain, None)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _multiply():
            def one(item, piece, tall, height, begin):
                del height

                def scope(acc):
                    def stage(k, _):
                        at = slot(begin + k)
                        plgpu.barrier_wait(full.at[at])
                        plgpu.wgmma(acc, a_smem.at[at], x_smem.at[at].transpose((1, 0)))
                        plgpu.wgmma_wait(1)

                        @pl.when(k > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[slot(begin + k - 1)])

                    lax.fori_loop(0, steps, stage, None)
                    return acc[...]

                z = pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((TALL, tile_rows), jnp.float32))
                plgpu.barrier_arrive(empty.at[slot(begin + steps - 1)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out.transpose((1, 0))[...] = plgpu.layout_cast(z, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                row, ranks = items_ref[item, 6], pl.ds(tall * TALL, TALL)

                def put(r, _):
                    target = parts_ref.at[piece, row + r, ranks]
                    plgpu.copy_smem_to_gmem(out.at[r], target, commit_group=False)

                lax.fori_loop(items_ref[item, 7], items_ref[item, 8], put, None)
                plgpu.commit_smem_to_gmem_group()

            for_each_work(one)
            plgpu.wait_smem_to_gmem(0)

    return _shrink_kernel
