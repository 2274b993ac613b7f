"""x times one matrix per group of rows on a Hopper GPU: a persistent Mosaic kernel.

Weights are wgmma's M operand and rows its N operand, so that a group of one row costs a tile of 8.
One warpgroup copies tiles into a ring of stages, ahead over the borders of work items; the others
multiply. Which group, rows and columns a CTA's next work is, it counts from group_sizes as it goes.
The blocks of one tile of weights come after one another, so that L2 reads it once.

A row's result is one sum over d_in in steps of 16, whatever the tiles and its neighbours.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops import hopper, tuning_table
from lora_jax.ops.grouped_matmul._gpu_tiles import (
    ALIGN,
    STEP,
    STORED,
    Config,
    find_config,
)
from lora_jax.typing import Array, Float, Int


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_out d_in"],
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
    *,
    config: Config | None = None,
    interpret: hopper.Interpret = None,
) -> Float[Array, "rows d_out"]:
    """What the reference says; reads the matrices of groups that have rows, and only those.

    `interpret`: see hopper.require. Raises NotImplementedError for another machine or dtype, and
    for sizes that do not fill tiles. A single group is a dense layer: XLA's own matmul is faster at
    some sizes, but picks the order of a row's sums by the number of rows.
    """
    _require("grouped_matmul", x, w, interpret)
    rows, (groups, d_out, d_in) = x.shape[0], w.shape
    shape = {"rows": rows, "groups": groups, "d_out": d_out, "d_in": d_in}
    tuned = config or tuning_table.find("grouped_matmul", shape, Config)
    config = tuned or find_config(rows, groups, d_out)
    return _launch(x, (w,), group_sizes, (bias,), config, interpret)


def gated_matmul(
    x: Float[Array, "rows d_in"],
    w_gate: Float[Array, "groups d_out d_in"],
    w_up: Float[Array, "groups d_out d_in"],
    group_sizes: Int[Array, "groups"],
    *,
    config: Config | None = None,
    interpret: hopper.Interpret = None,
) -> Float[Array, "rows d_out"]:
    """silu(w_gate[g] @ x[t]) * (w_up[g] @ x[t]) in one launch; both products rounded to bfloat16.

    Raises NotImplementedError as grouped_matmul does.
    """
    _require("gated_matmul", x, w_gate, interpret)
    config = config or find_config(x.shape[0], w_gate.shape[0], w_gate.shape[1], 2)
    return _launch(x, (w_gate, w_up), group_sizes, (None, None), config, interpret)


def _require(
    op: str,
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_out d_in"],
    interpret: hopper.Interpret,
) -> None:
    """Raise NotImplementedError, saying why, for what the kernel does not serve."""
    hopper.require(op, x.dtype, interpret)
    rows, (groups, d_out, d_in) = x.shape[0], w.shape
    if rows < 1 or groups < 1:
        raise NotImplementedError(f"{op} on Mosaic GPU: {rows} rows in {groups} groups")
    if d_in % STEP or d_in == 0 or d_out % ALIGN or d_out == 0:
        raise NotImplementedError(
            f"{op} on Mosaic GPU takes d_in in steps of {STEP} and d_out in steps of {ALIGN}, "
            f"not {d_in} and {d_out}"
        )
    # Results leave in swizzled blocks, of which the compiler wants whole ones.
    if not interpret and d_out > hopper.COLUMNS and d_out % hopper.COLUMNS:
        raise NotImplementedError(
            f"{op} on Mosaic GPU takes d_out above {hopper.COLUMNS} in steps of it, not {d_out}"
        )


# Equal launches of a program's layers are traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _launch(
    x: Float[Array, "rows d_in"],
    weights: tuple[Float[Array, "groups d_out d_in"], ...],
    group_sizes: Int[Array, "groups"],
    biases: tuple[Float[Array, "groups d_out"] | None, ...],
    config: Config,
    interpret: hopper.Interpret,
) -> Float[Array, "rows d_out"]:
    """Return the product, or with two weights and no bias silu of the first times the second."""
    rows, d_out = x.shape[0], weights[0].shape[1]
    wide = config.columns * config.warpgroups
    # Biases are read in whole tiles, rows are copied eight at a time.
    pad = ((0, 0), (0, -d_out % wide))
    given = [jnp.pad(b, pad) for b in biases if b is not None]
    x = jnp.pad(x, ((0, -rows % ALIGN), (0, 0)))
    stages, stored = config.stages, min(config.rows, STORED)
    # Whole blocks leave swizzled, which single rows cannot: they have a place of their own.
    results = plgpu.SMEM((config.warpgroups, 2, stored, config.columns), x.dtype)
    ctas = hopper.num_sms(interpret) * config.ctas
    kernel = plgpu.kernel(
        _kernel_body(config, len(x), weights, len(given), ctas, bool(interpret)),
        out_type=jax.ShapeDtypeStruct((len(x), d_out), x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((len(weights), stages, wide, STEP), x.dtype),
            plgpu.SMEM((stages, config.rows, STEP), x.dtype),
            results,
            results,
            plgpu.Barrier(num_arrivals=1 + len(weights), num_barriers=stages),
            plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        ],
        interpret=interpret or False,
    )
    return kernel(group_sizes, x, *weights, *given)[:rows]


def _kernel_body(
    config: Config, rows: int, weights: tuple, num_biases: int, ctas: int, interpreted: bool
):
    """Return the kernel: CTA c takes works c, c + ctas, ... of a list that nobody writes down.

    A group's works are its tiles of d_out times its blocks of rows, blocks first. Each warpgroup
    walks group_sizes to its next work, STRIDE at a time: with adapters' experts most are empty, and
    each would cost a load's latency. Rows in no group are the last group and read nothing.
    """
    dtype = weights[0].dtype
    columns, warpgroups, tile_rows = config.columns, config.warpgroups, config.rows
    stages, wide, matrices = config.stages, columns * warpgroups, len(weights)
    groups, d_out, d_in = weights[0].shape
    tiles, steps = pl.cdiv(d_out, wide), d_in // STEP
    stored = min(tile_rows, STORED)
    stride = min(groups, STRIDE)
    crowded = matrices * columns * tile_rows >= 128 * 128  # as many sums as half the registers

    def _grouped_matmul_kernel(sizes_ref, x_ref, *refs):
        w_refs, refs = refs[:matrices], refs[matrices:]
        bias_refs, refs = refs[:num_biases], refs[num_biases:]
        y_ref, w_smem, x_smem, block_smem, rows_smem, full, empty = refs
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        def place_of(group, start, first):
            """Return group, first row, end of rows, blocks, first work, end of works."""
            listed = sizes_ref[lax.min(group, jnp.int32(groups - 1))]
            size = jnp.where(group < groups, listed, rows - start)
            blocks = lax.div((start & (ALIGN - 1)) + size + tile_rows - 1, tile_rows)
            blocks = jnp.where(size > 0, blocks, 0)
            return group, start, start + size, blocks, first, first + blocks * tiles

        def behind(place):
            """Return the place of the next group."""
            return place_of(place[0] + 1, place[2], place[5])

        def span_from(first_place):
            """Return the first and the last place of the groups that are looked at together."""
            last = first_place
            for _ in range(stride - 1):
                last = behind(last)
            return first_place, last

        def seek(index, span):
            """Return the place that has this work (group beyond all: none has) and its span."""
            span = lax.while_loop(
                lambda s: (index >= s[1][5]) & (s[1][0] < groups),
                lambda s: span_from(behind(s[1])),
                span,
            )
            place = found = span[0]
            for _ in range(stride - 1):
                place = behind(place)
                late = index >= found[5]
                found = tuple(jnp.where(late, a, b) for a, b in zip(place, found, strict=True))
            group = jnp.where(index >= found[5], groups + 1, found[0])
            return (group, *found[1:]), span

        def for_each_work(do):
            """Call do(group, tile of d_out, first row, low, high, step), once more with a group
            beyond all, for nothing; return the last step."""

            def one(carry):
                index, step, span, _ = carry
                place, span = seek(index, span)
                group, start, end, blocks, first, _ = place
                tile = lax.div(index - first, lax.max(blocks, jnp.int32(1)))
                row = start - lax.rem(start, jnp.int32(ALIGN))
                row = row + lax.rem(index - first, lax.max(blocks, jnp.int32(1))) * tile_rows
                low = lax.max(start - row, jnp.int32(0))
                high = lax.min(end - row, jnp.int32(tile_rows))
                do(group, tile, pl.multiple_of(row, ALIGN), low, high, step)
                step = step + jnp.where(group < groups, steps, 0)
                return index + ctas, step, span, group <= groups

            zero = jnp.int32(0)
            before = (jnp.int32(-1), *(zero,) * 5)
            begin = (cta, zero, (before, before), jnp.bool_(True))
            return lax.while_loop(lambda c: c[3], one, begin)[1]

        @pl.when(warpgroup == warpgroups)
        def _copy():
            if crowded:
                plgpu.set_max_registers(40, action="decrease")

            def one(group, tile, row, low, high, begin):
                del low, high

                def stage(k, _):
                    at, depth = slot(begin + k), pl.ds(k * STEP, STEP)

                    @pl.when(begin + k >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[at])

                    for i, w_ref in enumerate(w_refs):
                        source = w_ref.at[group, pl.ds(tile * wide, wide), depth]
                        plgpu.copy_gmem_to_smem(source, w_smem.at[i, at], full.at[at])
                    source = x_ref.at[pl.ds(row, tile_rows), depth]
                    plgpu.copy_gmem_to_smem(source, x_smem.at[at], full.at[at])

                lax.fori_loop(0, jnp.where(group < groups, steps, 0), stage, None)

            copied = for_each_work(one)

            def drain(step, _):
                plgpu.barrier_wait(empty.at[slot(step)])

            lax.fori_loop(lax.max(copied - stages, jnp.int32(0)), copied, drain, None)

        @pl.when(warpgroup < warpgroups)
        def _multiply():
            if crowded:
                plgpu.set_max_registers(232, action="increase")
            side = warpgroup * columns

            def product(begin):
                def scope(*accs):
                    def stage(k, _):
                        at = slot(begin + k)
                        plgpu.barrier_wait(full.at[at])
                        for i, acc in enumerate(accs):
                            w = w_smem.at[i, at, pl.ds(side, columns)]
                            plgpu.wgmma(acc, w, x_smem.at[at].transpose((1, 0)))
                        plgpu.wgmma_wait(matrices)

                        @pl.when(k > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[slot(begin + k - 1)])

                    lax.fori_loop(0, steps, stage, None)
                    return tuple(acc[...] for acc in accs)

                one = plgpu.WGMMAAccumulatorRef((columns, tile_rows), jnp.float32)
                z = pl.run_scoped(scope, *[one] * matrices)
                plgpu.barrier_arrive(empty.at[slot(begin + steps - 1)])
                return z

            def store(z, tile, row, low, high):
                place = pl.ds(tile * wide + side, columns)
                for i in range(tile_rows // stored):
                    first = i * stored
                    part = z[:, first : first + stored].astype(dtype)
                    # The part before last has left; the interpreter counts copies, not groups.
                    pending = 0 if i == 0 or interpreted else 1
                    plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
                    whole = (low <= first) & (first + stored <= high)

                    @pl.when(whole)
                    def _(part=part, first=first, at=i % 2):
                        out = block_smem.at[warpgroup, at]
                        out.transpose((1, 0))[...] = part
                        plgpu.commit_smem()
                        target = y_ref.at[pl.ds(row + first, stored), place]
                        plgpu.copy_smem_to_gmem(out, target, commit_group=False)

                    @pl.when(~whole)
                    def _(part=part, first=first, at=i % 2):
                        out = rows_smem.at[warpgroup, at]
                        flipped = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
                        out.transpose((1, 0))[...] = flipped
                        plgpu.commit_smem()

                        def put_rows(width):
                            def put(r, _):
                                target = y_ref.at[row + r, pl.ds(tile * wide + side, width)]
                                source = out.at[r - first, pl.ds(0, width)]
                                plgpu.copy_smem_to_gmem(source, target, commit_group=False)

                            begin = lax.max(low, jnp.int32(first))
                            lax.fori_loop(
                                begin, lax.min(high, jnp.int32(first + stored)), put, None
                            )

                        hopper.at_own_width(put_rows, d_out, columns, warpgroups, tile, warpgroup)

                    plgpu.commit_smem_to_gmem_group()

            def bias(ref, group, tile):
                source = ref.at[group, pl.ds(tile * wide + side, columns)]
                layout = plgpu.Layout.WGMMA.reduce(1)
                b = plgpu.load(source, layout=layout, optimized=False).astype(jnp.float32)
                return lax.broadcast_in_dim(b, (columns, tile_rows), (0,))

            def one(group, tile, row, low, high, begin):
                @pl.when(group < groups)
                def _():
                    z = product(begin)
                    if matrices == 2:
                        gate, up = (v.astype(dtype).astype(jnp.float32) for v in z)
                        z = (gate / (1 + jnp.exp(-gate)) * up,)
                    z = z[0] + bias(bias_refs[0], group, tile) if num_biases else z[0]
                    store(z, tile, row, low, high)

                @pl.when(group == groups)
                def _():
                    zero = jnp.zeros((columns, tile_rows), jnp.float32)
                    zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
                    store(zero, tile, row, low, high)

            for_each_work(one)
            plgpu.wait_smem_to_gmem(0)

    return _grouped_matmul_kernel
