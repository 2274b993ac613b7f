"""The Mosaic kernel of attention over pages: one warpgroup copies, the other one attends.

Positions are wgmma's M operand and queries its N, so that a few heads cost a tile of 8: logits are
K q^T, and the values' sums V^T p. The running maximum is rounded to a whole power of two: what was
summed is then scaled exactly, and a sum has the same bits wherever it is put together.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops import hopper
from lora_jax.ops.paged_attention._gpu_schedule import (
    ALIGN,
    LOG2_E,
    LOWEST,
    AttentionConfig,
    AttentionSchedule,
    AttentionSizes,
)
from lora_jax.ops.paged_attention._gpu_sums import (
    WGMMA,
    add,
    columns_of,
    finished,
    iota,
    nothing,
    put_token,
    store_rows,
    wide,
    zeros,
)
from lora_jax.typing import Array, Float, Int

WARPS = 4  # of the warpgroup that copies
SLOTS = 2  # tiles of queries, the next item's is on its way


# Equal launches of a program's layers are traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnames=("sizes", "config", "interpret"))
def attend(
    q: Float[Array, "query_rows k_dim"],
    k: Float[Array, "places k_columns"],
    v: Float[Array, "places v_columns"] | None,
    block_tables: Int[Array, "seqs max_pages"],
    sinks: Float[Array, "kv_heads rows"],
    schedule: AttentionSchedule,
    sizes: AttentionSizes,
    config: AttentionConfig,
    interpret: hopper.Interpret,
) -> tuple[Array, ...]:
    """Return the result [query_rows, v_dim], or of a cut call the parts of its chunks.

    Parts are sums [parts, kv_heads, v_dim, rows], their maxima and their weights' sums
    [parts, kv_heads, rows], part i of token t at t * max_chunks + i. K and V are pages
    [pages * page_size, kv_heads * dim]; rows of q are tokens x q_heads.
    """
    rows, f32 = sizes.rows * config.tokens, jnp.float32
    ctas = hopper.num_sms(interpret) * config.ctas
    if config.cut:
        parts = schedule.num_parts.shape[0] * sizes.max_chunks(config.chunk)
        shape = (parts, sizes.kv_heads, rows)
        small = jax.ShapeDtypeStruct(shape, f32)
        sums = jax.ShapeDtypeStruct((parts, sizes.kv_heads, sizes.v_dim, rows), f32)
        out_type = (sums, small, small)
        out_smem = ()
    else:
        out_type = (jax.ShapeDtypeStruct((q.shape[0], sizes.v_dim), q.dtype),)
        out_smem = (plgpu.SMEM((rows, sizes.v_dim), q.dtype),)
    copies = max(1, config.block // sizes.page_size) * (1 if v is None else 2)
    pages = [k] if v is None else [k, v]
    widths = [sizes.k_dim] if v is None else [sizes.k_dim, sizes.v_dim]
    kernel = plgpu.kernel(
        _attend_body(sizes, config, q.shape[0], ctas),
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            [plgpu.SMEM((config.stages, config.block, width), q.dtype) for width in widths],
            plgpu.SMEM((SLOTS, rows, sizes.k_dim), q.dtype),
            plgpu.SMEM((rows, config.block), q.dtype),
            plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=config.tokens, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
            *out_smem,
        ],
        interpret=interpret or False,
    )
    return tuple(kernel(schedule.items, schedule.num_items, block_tables, sinks, q, *pages))


def _attend_body(sizes: AttentionSizes, config: AttentionConfig, query_rows: int, ctas: int):
    """Return the kernel: works are items times kv heads."""
    stages, rows, window = config.stages, sizes.rows * config.tokens, sizes.window
    kv_heads, group, page_size = sizes.kv_heads, sizes.group, sizes.page_size
    block_size, max_chunks = config.block, sizes.max_chunks(config.chunk)
    per_chunk, copied_rows = config.chunk // block_size, min(block_size, page_size)
    block_pages = block_size // copied_rows

    def _attend_kernel(items_ref, num_ref, tables_ref, sinks_ref, q_ref, *refs):
        num_pages = 1 if sizes.latent else 2
        page_refs, refs = refs[:num_pages], refs[num_pages:]
        num_outs = 3 if config.cut else 1
        out_refs, refs = refs[:num_outs], refs[num_outs:]
        page_smems, q_smem, p_smem, full, empty, q_full, q_empty = refs[:7]
        v_smem = page_smems[-1]
        cta = lax.axis_index("cta")
        works = num_ref[0] * kv_heads
        num_works = lax.div(works - cta + (ctas - 1), jnp.int32(ctas))

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        def for_each_work(do):
            """Call do(j, item, kv head, step); return the last step."""

            def one(j, step):
                index = works - 1 - (j * ctas + cta)  # a prompt's last tokens take longest
                item = lax.div(index, jnp.int32(kv_heads))
                head = lax.rem(index, jnp.int32(kv_heads))
                do(j, item, head, step)
                return step + items_ref[item, 5] - items_ref[item, 4]

            return lax.fori_loop(0, num_works, one, jnp.int32(0))

        def seen_by_item(item):
            """Return the first and the last position that any token of the item sees."""
            position, last = items_ref[item, 3], items_ref[item, 3] + items_ref[item, 1] - 1
            first = jnp.int32(0) if window is None else lax.max(position - window + 1, jnp.int32(0))
            return first, last

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _copy():
            def one(j, item, head, begin):
                at = lax.rem(j, jnp.int32(SLOTS))

                @pl.when(j >= SLOTS)
                def _():
                    plgpu.barrier_wait(q_empty.at[at])

                token, seq = items_ref[item, 0], items_ref[item, 2]
                for i in range(config.tokens):
                    row = lax.min(token + i, jnp.int32(query_rows // sizes.q_heads - 1))
                    row = row * sizes.q_heads + lax.div(head * group, jnp.int32(ALIGN)) * ALIGN
                    source = q_ref.at[pl.ds(pl.multiple_of(row, ALIGN), sizes.rows)]
                    target = q_smem.at[at, pl.ds(i * sizes.rows, sizes.rows)]
                    plgpu.copy_gmem_to_smem(source, target, q_full.at[at])
                first_block, end_block = items_ref[item, 4], items_ref[item, 5]
                first, last = seen_by_item(item)
                first_page, last_page = (lax.div(p, jnp.int32(page_size)) for p in (first, last))

                def block(b, _):
                    step = begin + b - first_block
                    here = slot(step)

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[here])

                    def copy(i):
                        """Ask for the i-th page of the block, if it is a page."""
                        position = b * block_size + i * page_size
                        page = lax.div(position, jnp.int32(page_size))
                        # Pages that no token sees need not be there.
                        page = lax.max(lax.min(page, last_page), first_page)
                        piece = tables_ref[seq, page]
                        if page_size > block_size:  # a page of several blocks
                            piece = piece * (page_size // block_size)
                            piece = piece + lax.rem(b, jnp.int32(page_size // block_size))
                        rows = pl.ds(piece * copied_rows, copied_rows)
                        target_rows = pl.ds(i * copied_rows, copied_rows)
                        for ref, smem in zip(page_refs, page_smems, strict=True):
                            width = smem.shape[-1]
                            columns = pl.ds(head * width, width)
                            target = smem.at[here, target_rows]
                            plgpu.copy_gmem_to_smem(ref.at[rows, columns], target, full.at[here])

                    @plgpu.warp_map
                    def _(warp):
                        for first in range(0, block_pages, WARPS):
                            pl.when(first + warp < block_pages)(lambda f=first: copy(f + warp))

                lax.fori_loop(first_block, end_block, block, None)

            copied = for_each_work(one)

            def drain(step, _):
                plgpu.barrier_wait(empty.at[slot(step)])

            def drain_queries(j, _):
                plgpu.barrier_wait(q_empty.at[lax.rem(j, jnp.int32(SLOTS))])

            lax.fori_loop(lax.max(copied - stages, jnp.int32(0)), copied, drain, None)
            lax.fori_loop(lax.max(num_works - SLOTS, jnp.int32(0)), num_works, drain_queries, None)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _attend():
            def chunk_sums(q_slot, item, first_block, end_block, begin):
                """Return maxima, weights' sums and the sums of V of some blocks."""
                position = items_ref[item, 3]
                first, last = seen_by_item(item)

                def block(b, carry):
                    top, total, acc = carry
                    here = slot(begin + b - first_block)
                    plgpu.barrier_wait(full.at[here])
                    keys = page_smems[0].at[here]

                    # Else their addresses are kept over the loop, in more registers than there are.
                    queries = q_smem.at[lax.optimization_barrier(q_slot)]

                    def logits(acc_ref):
                        plgpu.wgmma(acc_ref, keys, queries.transpose((1, 0)))
                        return acc_ref[...]

                    one = plgpu.WGMMAAccumulatorRef((block_size, rows), jnp.float32)
                    s = pl.run_scoped(logits, one) * jnp.float32(sizes.scale * LOG2_E)
                    values = v_smem.at[here, :, pl.ds(0, sizes.v_dim)]

                    @pl.when((b * block_size < first) | (b * block_size + (block_size - 1) > last))
                    def _():
                        _erase(values, first - b * block_size, last - b * block_size)

                    key_position = iota((block_size, rows), 0) + b * block_size
                    query_position = position + lax.div(
                        iota((block_size, rows), 1), jnp.int32(sizes.rows)
                    )
                    seen = key_position <= query_position
                    if window is not None:
                        seen = seen & (key_position > query_position - window)
                    s = jnp.where(seen, s, jnp.float32(LOWEST))
                    new_top = jnp.maximum(top, jnp.round(jnp.max(s, axis=0)))
                    p = jnp.where(seen, jnp.exp2(s - wide(new_top, block_size)), jnp.float32(0))
                    decay = jnp.exp2(top - new_top)
                    p_t = p_smem.transpose((1, 0))
                    p_t[...] = p.astype(p_smem.dtype)
                    plgpu.commit_smem()

                    sums = []
                    for before, columns in zip(acc, columns_of(sizes.v_dim), strict=True):

                        def weighted(acc_ref, columns=columns):
                            plgpu.wgmma(acc_ref, values.at[:, columns].transpose((1, 0)), p_t)
                            return acc_ref[...]

                        one = plgpu.WGMMAAccumulatorRef(before.shape, jnp.float32)
                        more = pl.run_scoped(weighted, one)
                        sums.append(before * wide(decay, len(before)) + more)
                    plgpu.barrier_arrive(empty.at[here])
                    total = total * wide(decay, block_size) + p
                    return new_top, total, tuple(sums)

                top, _, acc = nothing(rows, sizes.v_dim)
                start = top, zeros(block_size, rows), acc
                top, total, acc = lax.fori_loop(first_block, end_block, block, start)
                return top, jnp.sum(total, axis=0), acc

            def one(j, item, head, begin):
                at = lax.rem(j, jnp.int32(SLOTS))
                plgpu.barrier_wait(q_full.at[at])
                first_block, end_block = items_ref[item, 4], items_ref[item, 5]
                if config.cut:
                    sums = chunk_sums(at, item, first_block, end_block, begin)
                    plgpu.barrier_arrive(q_empty.at[at])
                    part = items_ref[item, 0] * max_chunks + items_ref[item, 6]
                    for columns, value in zip(columns_of(sizes.v_dim), sums[2], strict=True):
                        out_refs[0][part, head, columns] = value
                    for ref, value in zip(out_refs[1:], sums[:2], strict=True):
                        ref[part, head] = value
                    return

                def chunk(c, carry):
                    low = lax.max(c * per_chunk, first_block)
                    high = lax.min((c + 1) * per_chunk, end_block)
                    return add(carry, chunk_sums(at, item, low, high, begin + low - first_block))

                begin_chunk = lax.div(first_block, jnp.int32(per_chunk))
                end_chunk = lax.div(end_block + (per_chunk - 1), jnp.int32(per_chunk))
                end_chunk = jnp.where(end_block > first_block, end_chunk, begin_chunk)
                sums = lax.fori_loop(begin_chunk, end_chunk, chunk, nothing(rows, sizes.v_dim))
                plgpu.barrier_arrive(q_empty.at[at])
                o = finished(sums, sinks_ref.at[head])
                store_rows(o_smem, o)

                def put(i, _):
                    token, first = items_ref[item, 0] + i, i * sizes.rows
                    put_token(o_smem, out_refs[0], sizes, token, head, first)

                lax.fori_loop(0, items_ref[item, 1], put, None)
                plgpu.commit_smem_to_gmem_group()

            if not config.cut:
                o_smem = refs[7]
            for_each_work(one)
            if not config.cut:
                plgpu.wait_smem_to_gmem(0)

    return _attend_kernel


def _erase(values, first, last) -> None:
    """Make V zero before place `first` and after `last`: what no token sees may hold anything."""

    def erase(i, _):
        column = pl.multiple_of(i * hopper.COLUMNS, hopper.COLUMNS)
        some = values.at[:, pl.ds(column, hopper.COLUMNS)]
        v = plgpu.load(some, layout=WGMMA)
        row = iota(v.shape, 0)
        some[...] = jnp.where((row >= first) & (row <= last), v, jnp.zeros_like(v))

    lax.fori_loop(0, values.shape[1] // hopper.COLUMNS, erase, None)
    plgpu.commit_smem()
