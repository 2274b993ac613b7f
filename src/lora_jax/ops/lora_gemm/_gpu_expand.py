"""y + h B of sorted rows: a persistent Mosaic kernel with rank rows as wgmma's K dimension."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops import hopper
from lora_jax.ops.lora_gemm._gpu_schedule import ALIGN, CTAS, STEP, LoraGemmConfig, LoraGemmSchedule
from lora_jax.typing import Array, Float


# Equal launches of a program's layers are traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def expand(
    y: Float[Array, "rows d_out"],
    h: Float[Array, "steps padded 16"],
    b_pool: Float[Array, "b_rows d_out"],
    schedule: LoraGemmSchedule,
    config: LoraGemmConfig,
    interpret: hopper.Interpret,
) -> Float[Array, "rows d_out"]:
    """Return y[order[p]] + sum_j h[p, j] B[j], in place if y is a temporary."""
    wide = config.columns * config.warpgroups
    ctas = hopper.num_sms(interpret) * CTAS
    stages, slots, tile_rows = config.expand_stages, config.slots, config.rows
    kernel = plgpu.kernel(
        _expand_body(config, y.shape[1], ctas, bool(interpret)),
        out_type=(),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages, STEP, wide), y.dtype),
            plgpu.SMEM((slots, h.shape[0], tile_rows, STEP), y.dtype),
            plgpu.SMEM((slots, tile_rows, wide), y.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1 + tile_rows, num_barriers=slots),
            plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=slots),
        ],
        interpret=interpret or False,
    )
    y_ref = jax.new_ref(y)
    kernel(schedule.items, schedule.num_items, schedule.order, h, b_pool, y_ref)
    return y_ref[...]


def _expand_body(config: LoraGemmConfig, d_out: int, ctas: int, interpreted: bool):
    """Return the kernel: works are items times tiles of d_out, in stages of 16 rank rows."""
    columns, warpgroups, tile_rows = config.columns, config.warpgroups, config.rows
    stages, slots, wide = config.expand_stages, config.slots, columns * warpgroups
    tiles = pl.cdiv(d_out, wide)

    def _expand_kernel(items_ref, num_ref, order_ref, h_ref, b_ref, y_ref, *scratch):
        b_smem, h_smem, y_smem, full, empty, ready, done = scratch
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
        num_works = lax.div(num_ref[0] * tiles - cta + (ctas - 1), jnp.int32(ctas))

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        def for_each_work(do):
            """Call do(j, item, tile of d_out, stages, step); return the last step."""

            def one(j, step):
                index = j * ctas + cta
                item, tile = lax.div(index, jnp.int32(tiles)), lax.rem(index, jnp.int32(tiles))
                depth = lax.div(items_ref[item, 5] + (STEP - 1), jnp.int32(STEP))
                do(j, item, tile, depth, step)
                return step + depth

            return lax.fori_loop(0, num_works, one, jnp.int32(0))

        @pl.when(warpgroup == warpgroups)
        def _copy():
            def one(j, item, tile, depth, begin):
                at = lax.rem(j, jnp.int32(slots))

                @pl.when(j >= slots)
                def _():
                    plgpu.barrier_wait(done.at[at])

                row = pl.multiple_of(items_ref[item, 6], ALIGN)
                low, high = items_ref[item, 7], items_ref[item, 8]
                source = h_ref.at[:, pl.ds(row, tile_rows)]
                plgpu.copy_gmem_to_smem(source, h_smem.at[at], ready.at[at])

                def take(r, _):
                    inside = (low <= r) & (r < high)

                    @pl.when(inside)
                    def _():
                        source = y_ref.at[order_ref[row + r], pl.ds(tile * wide, wide)]
                        plgpu.copy_gmem_to_smem(source, y_smem.at[at, r], ready.at[at])

                    @pl.when(~inside)
                    def _():
                        plgpu.barrier_arrive(ready.at[at])

                lax.fori_loop(0, tile_rows, take, None)

                def stage(k, _):
                    place = slot(begin + k)

                    @pl.when(begin + k >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[place])

                    rank_row = pl.multiple_of(items_ref[item, 1] + k * STEP, ALIGN)
                    source = b_ref.at[pl.ds(rank_row, STEP), pl.ds(tile * wide, wide)]
                    plgpu.copy_gmem_to_smem(source, b_smem.at[place], full.at[place])

                lax.fori_loop(0, depth, stage, None)

            copied = for_each_work(one)

            def drain(step, _):
                plgpu.barrier_wait(empty.at[slot(step)])

            def drain_work(j, _):
                plgpu.barrier_wait(done.at[lax.rem(j, jnp.int32(slots))])

            lax.fori_loop(lax.max(copied - stages, jnp.int32(0)), copied, drain, None)
            lax.fori_loop(lax.max(num_works - slots, jnp.int32(0)), num_works, drain_work, None)

        @pl.when(warpgroup < warpgroups)
        def _multiply():
            layout = plgpu.Layout.WGMMA
            flipped = plgpu.Layout.WGMMA_TRANSPOSED
            side = pl.ds(warpgroup * columns, columns)

            def one(j, item, tile, depth, begin):
                at = lax.rem(j, jnp.int32(slots))
                plgpu.barrier_wait(ready.at[at])

                @pl.when(j > 0)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(done.at[lax.rem(j - 1, jnp.int32(slots))])

                b_low, b_end = items_ref[item, 4], items_ref[item, 5]

                def scope(acc):
                    def stage(k, _):
                        place = slot(begin + k)
                        plgpu.barrier_wait(full.at[place])
                        b_t = b_smem.at[place, :, side].transpose((1, 0))
                        b = plgpu.load(b_t, layout=layout)
                        # A neighbour's rank row may hold NaN, which no zero of h would take out.
                        index = plgpu.broadcasted_iota(jnp.int32, b.shape, 1, layout=layout)
                        index = index + k * STEP
                        b = jnp.where((index >= b_low) & (index < b_end), b, jnp.zeros_like(b))
                        h_t = h_smem.at[at, k].transpose((1, 0))
                        if interpreted:  # which has no operands in registers
                            b_t[...] = b
                            plgpu.commit_smem()
                            plgpu.wgmma(acc, b_t, h_t)
                        else:
                            plgpu.wgmma(acc, b, h_t)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[place])

                    lax.fori_loop(0, depth, stage, None)
                    return acc[...]

                one = plgpu.WGMMAAccumulatorRef((columns, tile_rows), jnp.float32)
                delta = plgpu.layout_cast(pl.run_scoped(scope, one), flipped)
                y_t = y_smem.at[at, :, side].transpose((1, 0))
                old = plgpu.load(y_t, layout=flipped, optimized=False).astype(jnp.float32)
                y_t[...] = (old + delta).astype(y_ref.dtype)
                plgpu.commit_smem()

                def put_rows(width):
                    begin = warpgroup * columns

                    def put(r, _):
                        row = order_ref[items_ref[item, 6] + r]
                        target = y_ref.at[row, pl.ds(tile * wide + begin, width)]
                        source = y_smem.at[at, r, pl.ds(begin, width)]
                        plgpu.copy_smem_to_gmem(source, target, commit_group=False)

                    lax.fori_loop(items_ref[item, 7], items_ref[item, 8], put, None)

                hopper.at_own_width(put_rows, d_out, columns, warpgroups, tile, warpgroup)
                plgpu.commit_smem_to_gmem_group()

            for_each_work(one)
            plgpu.wait_smem_to_gmem(0)

            @pl.when(num_works > 0)
            def _():
                plgpu.barrier_arrive(done.at[lax.rem(num_works - 1, jnp.int32(slots))])

    return _expand_kernel
