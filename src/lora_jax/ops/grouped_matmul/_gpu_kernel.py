"""The body of the Mosaic GPU kernel: one warpgroup copies, the others multiply and store.

With two weights, silu of the first product times the second is stored. Products are rounded to the
rows' dtype before anything is done with them, so that they have the same bits in every form. Maps
side by side are several weights of one x and a result of each: their tiles are one list of works.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops import hopper
from lora_jax.ops.grouped_matmul import _gpu_weights
from lora_jax.ops.grouped_matmul._gpu_tiles import ALIGN, Depths, GroupedMatmulConfig
from lora_jax.ops.grouped_matmul._gpu_weights import Form
from lora_jax.ops.grouped_matmul._gpu_works import Works

CROWDED = 128 * 128  # sums of a warpgroup: half the registers
# Of a thread then, in multiples of 8: together what three warpgroups start with, 3 x 168.
COPY_REGISTERS, MULTIPLY_REGISTERS = 24, 240


@dataclasses.dataclass(frozen=True)
class Operands:
    """Inputs of a launch; `addends` counts the arrays that products are added to.

    `d_outs` are the widths of maps side by side, whose `weights` are then one in a product.
    """

    rows: int
    groups: int
    d_outs: tuple[int, ...]
    d_in: int
    weights: int
    biases: int
    addends: int
    dtype: jnp.dtype
    form: Form
    asks_added: bool = False  # whether an array comes behind them that is 0 where nothing is added


def kernel_body(
    config: GroupedMatmulConfig, deep: Depths, operands: Operands, ctas: int, interpreted: bool
):
    """Return the kernel for these tiles; refs as `pallas_gpu` lists them."""
    dtype, matrices, groups = operands.dtype, operands.weights, operands.groups
    columns, warpgroups, tile_rows = config.columns, config.warpgroups, config.rows
    stages, wide = config.stages, columns * warpgroups
    steps, stored = operands.d_in // operands.form.step, config.stored
    form = operands.form
    ahead = deep.addends
    d_outs, maps = operands.d_outs, len(operands.d_outs)
    tiles = [pl.cdiv(d_out, wide) for d_out in d_outs]
    works = Works(groups, operands.rows, tile_rows, sum(tiles), steps, ctas)
    crowded = matrices * columns * tile_rows >= CROWDED

    def for_map(tile, do):
        """Call do(map, tile of this map) of the map that has a tile of all maps'."""
        if maps == 1:
            do(0, tile)
            return
        for number, many in enumerate(tiles):
            own = tile - sum(tiles[:number])
            pl.when((own >= 0) & (own < many))(functools.partial(do, number, own))

    def _grouped_matmul_kernel(sizes_ref, num_rows_ref, x_ref, *refs):
        w_refs, refs = refs[: matrices * maps], refs[matrices * maps :]
        scaled = matrices * form.arrays
        scale_refs, refs = [refs[i:scaled:matrices] for i in range(matrices)], refs[scaled:]
        bias_refs, refs = refs[: operands.biases], refs[operands.biases :]
        addend_refs, refs = refs[: operands.addends], refs[operands.addends :]
        added_refs, refs = refs[: operands.asks_added], refs[operands.asks_added :]
        y_refs, refs = refs[:maps], refs[maps:]
        w_smem, x_smem, block_smem, rows_smem, full, empty = refs[:6]
        addend_smem, arrived = refs[6:8] if addend_refs else (x_smem, x_smem)  # or not used
        plain_smem = refs[-1]  # it is there if weights are made plain by the interpreter
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
        num_rows = num_rows_ref[0]
        nothing_added = added_refs[0][0] == 0 if added_refs else None

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        @pl.when(warpgroup == warpgroups)
        def _copy():
            if crowded:
                plgpu.set_max_registers(COPY_REGISTERS, action="decrease")

            def one(group, tile, row, low, high, begin):
                del low, high

                def stage(k, _):
                    at, depth = slot(begin + k), pl.ds(k * form.step, form.step)
                    stored_depth = pl.ds(k * form.stored_step, form.stored_step)

                    @pl.when(begin + k >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[at])

                    def copy_weights(number, tile):
                        for i, w_ref in enumerate(w_refs[number * matrices :][:matrices]):
                            source = w_ref.at[group, pl.ds(tile * wide, wide), stored_depth]
                            plgpu.copy_gmem_to_smem(source, w_smem.at[i, at], full.at[at])

                    for_map(tile, copy_weights)
                    source = x_ref.at[pl.ds(row, tile_rows), depth]
                    plgpu.copy_gmem_to_smem(source, x_smem.at[at], full.at[at])

                lax.fori_loop(0, jnp.where(group < groups, steps, 0), stage, None)

            copied = works.for_each(sizes_ref, num_rows, cta, one)

            def drain(step, _):
                plgpu.barrier_wait(empty.at[slot(step)])

            lax.fori_loop(lax.max(copied - stages, jnp.int32(0)), copied, drain, None)

        @pl.when(warpgroup < warpgroups)
        def _multiply():
            if crowded:
                plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            side = warpgroup * columns

            def product(begin, group, tile):
                def scales(k):
                    rows = pl.ds(tile * wide + side, columns)
                    return tuple(
                        _gpu_weights.scales_of(form, some, group, rows, k) for some in scale_refs
                    )

                def scope_in_registers(*accs):
                    def stage(k, these):
                        at = slot(begin + k)
                        following = scales(lax.min(k + 1, jnp.int32(steps - 1)))
                        plgpu.barrier_wait(full.at[at])
                        for i, acc in enumerate(accs):
                            stored = w_smem.at[i, at, pl.ds(side, columns)]
                            w = _gpu_weights.made_plain(form, stored, these[i], interpreted)
                            if interpreted:  # it multiplies from shared memory only
                                place = plain_smem.at[i, pl.ds(side, columns)]
                                place[...] = w
                                plgpu.commit_smem()
                                w = place
                            plgpu.wgmma(acc, w, x_smem.at[at].transpose((1, 0)))
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[at])
                        return following

                    lax.fori_loop(0, steps, stage, scales(jnp.int32(0)))
                    return tuple(acc[...] for acc in accs)

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
                if form.quantised:
                    return pl.run_scoped(scope_in_registers, *[one] * matrices)
                z = pl.run_scoped(scope, *[one] * matrices)
                plgpu.barrier_arrive(empty.at[slot(begin + steps - 1)])
                return z

            def fetch(tile, row, high, part):
                """Ask for what is added to a part of the tile, if it has rows."""

                @pl.when(part * stored < high)
                def _():
                    first = row + part * stored
                    if nothing_added is not None:
                        # A copy from behind the last row brings zeros and reads no memory.
                        behind = jnp.int32(operands.rows)
                        first = pl.multiple_of(lax.select(nothing_added, behind, first), ALIGN)
                    rows = pl.ds(first, stored)
                    span, at = pl.ds(tile * wide + side, columns), part % ahead
                    for i, ref in enumerate(addend_refs):
                        target = addend_smem.at[warpgroup, at, i]
                        barrier = arrived.at[ahead * warpgroup + at]
                        plgpu.copy_gmem_to_smem(ref.at[rows, span], target, barrier)

            def finished(z, biases, part):
                """Return a part of the tile as it is stored."""
                some = slice(part * stored, (part + 1) * stored)
                values = [v[:, some] for v in z]
                # By parts: of the whole tile, both the products and the sums would be in registers.
                if biases:
                    shape = (columns, stored)
                    wide_biases = [lax.broadcast_in_dim(b, shape, (0,)) for b in biases]
                    values = [v + b for v, b in zip(values, wide_biases, strict=True)]
                values = [v.astype(dtype) for v in values]
                if addend_refs:
                    at = part % ahead
                    plgpu.barrier_wait(arrived.at[ahead * warpgroup + at])
                    values = [
                        added(v, addend_smem.at[warpgroup, at, i]) for i, v in enumerate(values)
                    ]
                if len(values) == 1:
                    return values[0]
                gate, up = (v.astype(jnp.float32) for v in values)
                return (gate * (1 / (1 + jnp.exp(-gate))) * up).astype(dtype)

            def added(value, addend_ref):
                """Return value plus an addend, which lies in rows of d_out, rounded again."""
                layout = plgpu.Layout.WGMMA_TRANSPOSED
                value = plgpu.layout_cast(value, layout).astype(jnp.float32)
                addend = plgpu.load(addend_ref.transpose((1, 0)), layout=layout, optimized=False)
                return (value + addend.astype(jnp.float32)).astype(dtype)

            def store(value_of, tile, row, low, high, behind=lambda part: None):
                """Store value_of(part) of the parts that have rows, calling behind(part) then."""
                for i in range(config.parts):

                    @pl.when(i * stored < high)
                    def _(i=i):
                        store_part(i, value_of(i), tile, row, low, high)
                        behind(i)

            def store_part(i, part, tile, row, low, high):
                first = i * stored
                # The tile before has long left, and then a part's place is its own for a while.
                if i == 0 or i >= deep.results:
                    # The interpreter counts copies, not groups.
                    pending = 0 if i == 0 or interpreted else deep.results - 1
                    plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
                whole = (low <= first) & (first + stored <= high)

                @pl.when(whole)
                def _():
                    out = block_smem.at[warpgroup, i % deep.results]
                    out.transpose((1, 0))[...] = part
                    plgpu.commit_smem()

                    def put(number, tile):
                        span = pl.ds(tile * wide + side, columns)
                        target = y_refs[number].at[pl.ds(row + first, stored), span]
                        plgpu.copy_smem_to_gmem(out, target, commit_group=False)

                    for_map(tile, put)

                @pl.when(~whole)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out = rows_smem.at[warpgroup]
                    flipped = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
                    out.transpose((1, 0))[...] = flipped
                    plgpu.commit_smem()

                    begin = lax.max(low, jnp.int32(first))
                    end = lax.min(high, jnp.int32(first + stored))
                    count = lax.max(end - begin, jnp.int32(0))

                    def put_rows(y_ref, tile, width):
                        # 1, 2, 4, ... rows at a time: a copy a row takes longer than is hidden.
                        for size in (1 << n for n in range(stored.bit_length() - 1)):

                            @pl.when((count & size) != 0)
                            def _(size=size):
                                r = begin + (count & (size - 1))
                                if size == 1:
                                    source = out.at[r - first, pl.ds(0, width)]
                                    target = y_ref.at[row + r, pl.ds(tile * wide + side, width)]
                                else:
                                    source = out.at[pl.ds(r - first, size)]
                                    span = pl.ds(tile * wide + side, columns)
                                    target = y_ref.at[pl.ds(row + r, size), span]
                                plgpu.copy_smem_to_gmem(source, target, commit_group=False)

                    def put(number, tile):
                        put_own = functools.partial(put_rows, y_refs[number], tile)
                        sizes = d_outs[number], columns, warpgroups
                        hopper.at_own_width(put_own, *sizes, tile, warpgroup)

                    for_map(tile, put)

                plgpu.commit_smem_to_gmem_group()

            def bias(ref, group, tile):
                source = ref.at[group, pl.ds(tile * wide + side, columns)]
                layout = plgpu.Layout.WGMMA.reduce(1)
                return plgpu.load(source, layout=layout, optimized=False).astype(jnp.float32)

            def one(group, tile, row, low, high, begin):
                def fetch_next(part):
                    if addend_refs and part + ahead < config.parts:
                        fetch(tile, row, high, part + ahead)

                @pl.when(group < groups)
                def _():
                    for part in range(ahead):
                        fetch(tile, row, high, part)
                    z = product(begin, group, tile)
                    biases = [bias(ref, group, tile) for ref in bias_refs]
                    store(lambda part: finished(z, biases, part), tile, row, low, high, fetch_next)

                @pl.when(group == groups)
                def _():
                    zero = plgpu.layout_cast(
                        jnp.zeros((columns, stored), dtype), plgpu.Layout.WGMMA
                    )
                    store(lambda part: zero, tile, row, low, high)

            works.for_each(sizes_ref, num_rows, cta, one)
            plgpu.wait_smem_to_gmem(0)

    return _grouped_matmul_kernel
