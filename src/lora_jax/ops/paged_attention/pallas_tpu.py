"""Attention over pages on a TPU: a Pallas kernel over blocks of tokens of one sequence.

Each item is up to some tokens at consecutive positions of one sequence; one token (decode) takes a
path of its own that does not compute the others. Pages come from HBM by DMA through the block
table, a block of positions ahead, across items too. Blocks of positions begin at multiples of their
size, so a token meets the same sums in the same order however its sequence is chunked. Softmax is
online (FlashAttention-2, algorithm 1).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lora_jax.ops.dispatch import Declined
from lora_jax.ops.paged_attention.args import PagedAttentionArgs
from lora_jax.ops.row_items import row_items
from lora_jax.typing import Array, Float, Int

LANES = 128
SUBLANES = 8  # of float32
BLOCK_POSITIONS = 256
MAX_QUERIES = 256  # rows of q (tokens x heads of one kv head) of an item
MAX_TOKENS = 32  # of an item
MAX_TABLE = 1 << 17  # entries of the block tables, which lie in SMEM
MAX_STEP = 1 << 13  # tokens of one call: their items lie in SMEM too
LOWEST = -1e30  # stands for minus infinity where a difference of two must not be NaN


@dataclasses.dataclass(frozen=True)
class _AttentionSizes:
    """Static sizes of one call."""

    tokens: int  # of an item at most
    kv_heads: int
    group: int  # q heads of one kv head, rounded up to whole tiles
    k_dim: int
    v_dim: int
    page_size: int
    block: int  # positions
    max_pages: int
    scale: float
    window: int | None
    latent: bool  # V is the first v_dim of K
    one_head: bool  # pages are [page_size, dim] for the kernel, without an axis of heads

    @property
    def queries(self) -> int:
        return self.tokens * self.group

    def kv_shape(self, dim: int) -> tuple[int, ...]:
        """Return the shape of two blocks of K or V, as they lie in VMEM."""
        return (2, self.block, dim) if self.one_head else (2, self.block, self.kv_heads, dim)

    def vmem_bytes(self, itemsize: int) -> int:
        heads = self.kv_heads * self.queries
        rows = heads * (3 * self.k_dim + 2 * self.v_dim + 3 * LANES) * 4
        kv = 2 * self.block * max(self.kv_heads, SUBLANES) * (self.k_dim + self.v_dim) * itemsize
        return rows + kv + 4 * self.queries * self.block * 4


def paged_attention(
    args: PagedAttentionArgs,
    *,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> Float[Array, "tokens q_heads v_dim"]:
    """Same result as the reference; weights of the softmax are rounded to the dtype before V.

    `interpret` None runs on a TPU only; parameters run the kernel interpreted on any device, and
    False compiles it for the target at hand. A k_dim that is no multiple of 128 (MLA's 576) is
    read in place if the pages were allocated with k_dim innermost; XLA prefers another order for
    it, and copies all pages at every call otherwise.

    Raises:
        Declined: not on a TPU; head sizes or a page size that do not fill tiles; block
            tables or tokens that SMEM does not hold.
    """
    if interpret is None and jax.default_backend() != "tpu":
        raise Declined("paged_attention: the TPU kernel runs on a TPU only")
    q, k_pages, v_pages, v_dim = args.q, args.k_pages, args.v_pages, args.v_dim
    block_tables, sinks = args.block_tables, args.sinks
    _decline(q, k_pages, block_tables, v_dim)
    softmax = (args.scale, v_dim, args.sliding_window)
    sizes = _sizes(q, k_pages, block_tables, *softmax, v_pages is None)
    num, q_heads, k_dim = q.shape
    heads = q_heads // sizes.kv_heads
    room = ((0, 0), (0, 0), (0, sizes.group - heads), (0, 0))
    # float32, so that tiles of q and of the result are 8 heads high whatever the dtype.
    split = jnp.pad(q.reshape(num, sizes.kv_heads, heads, k_dim).astype(jnp.float32), room)
    if sinks is not None:
        sinks = jnp.pad(sinks.astype(jnp.float32).reshape(1, sizes.kv_heads, heads, 1), room)[0]
        sinks = jnp.tile(sinks, (1, sizes.tokens, 1))
    table = _items(block_tables, args.token_to_seq, args.positions, args.num_tokens, sizes.tokens)
    pages = [p[:, :, 0] if sizes.one_head else p for p in (k_pages, v_pages) if p is not None]
    out = _call(table, split, sinks, pages, sizes, interpret or False)
    return out[:, :, :heads].reshape(num, q_heads, v_dim).astype(q.dtype)


def _sizes(
    q, k_pages, block_tables, scale: float, v_dim: int, window, latent: bool
) -> _AttentionSizes:
    """Return the sizes of a call."""
    num, q_heads, k_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    group = -(-(q_heads // kv_heads) // SUBLANES) * SUBLANES
    return _AttentionSizes(
        tokens=min(MAX_TOKENS, max(1, MAX_QUERIES // group), 1 << (num - 1).bit_length()),
        kv_heads=kv_heads,
        group=group,
        k_dim=k_dim,
        v_dim=v_dim,
        page_size=page_size,
        block=max(BLOCK_POSITIONS, page_size),
        max_pages=block_tables.shape[1],
        scale=scale,
        window=window,
        latent=latent,
        one_head=_lies_without_heads(k_pages),
    )


def _lies_without_heads(pages: Float[Array, "pages page_size kv_heads dim"]) -> bool:
    """Return whether XLA lays these pages out as if there were no axis of heads.

    So it does with one head in bfloat16, whose tiles hold pairs of rows; the kernel must take
    pages as they lie, or XLA copies all of them at every call.
    """
    return pages.shape[2] == 1 and pages.dtype.itemsize == 2


def _decline(q, k_pages, block_tables, v_dim: int) -> None:
    """Raise Declined for what the kernel cannot serve."""
    page_size, kv_heads, k_dim = k_pages.shape[1:]
    if (k_dim % LANES and kv_heads > 1) or v_dim % LANES:
        raise Declined(
            f"paged_attention: {kv_heads} kv heads of {k_dim} and {v_dim}; the TPU kernel takes "
            f"multiples of {LANES}, and any k_dim of one head"
        )
    if max(BLOCK_POSITIONS, page_size) % min(BLOCK_POSITIONS, page_size) or page_size % SUBLANES:
        raise Declined(
            f"paged_attention: pages of {page_size} positions; the TPU kernel takes divisors and "
            f"multiples of {BLOCK_POSITIONS} from {SUBLANES} on"
        )
    if block_tables.size > MAX_TABLE or not 0 < q.shape[0] <= MAX_STEP:
        raise Declined(
            f"paged_attention: {q.shape[0]} tokens and {block_tables.size} pages in block tables; "
            f"the TPU kernel takes 1 to {MAX_STEP} and up to {MAX_TABLE}"
        )


def _items(
    block_tables: Int[Array, "seqs max_pages"],
    token_to_seq: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    num_tokens: Int[Array, ""],
    tokens: int,
) -> tuple[Array, ...]:
    """Return (how many, start, end, sequence, first position) of items, and the flat tables."""
    same = (token_to_seq[1:] == token_to_seq[:-1]) & (positions[1:] == positions[:-1] + 1)
    items = row_items(jnp.pad(~same, (1, 0), constant_values=True), num_tokens, tokens)
    at = jnp.minimum(items.start, token_to_seq.shape[0] - 1)
    arrays = (items.num_items.reshape(1), items.start, items.end, token_to_seq[at], positions[at])
    return *arrays, block_tables.reshape(-1)


def _call(
    table: tuple[Array, ...],
    q: Float[Array, "tokens kv_heads group k_dim"],
    sinks: Float[Array, "kv_heads queries 1"] | None,
    pages: list[Array],
    sizes: _AttentionSizes,
    interpret: pltpu.InterpretParams | bool,
) -> Float[Array, "tokens kv_heads group v_dim"]:
    """Return the attention of all items in float32, and 0 for tokens in none."""
    out = jnp.zeros((*q.shape[:3], sizes.v_dim), jnp.float32)
    hbm, whole = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    extra = [] if sinks is None else [sinks]
    return pl.pallas_call(
        functools.partial(_paged_attention_kernel, sizes, sinks is not None),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table),
            grid=(jnp.maximum(table[0][0], 1),),
            in_specs=[hbm] * (2 + len(pages)) + [whole] * len(extra),
            out_specs=hbm,
            scratch_shapes=_scratch(sizes, pages[0].dtype),
        ),
        input_output_aliases={len(table): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=sizes.vmem_bytes(pages[0].dtype.itemsize) + (16 << 20),
        ),
        interpret=interpret,
        name="paged_attention",
    )(*table, out, q, *pages, *extra)


def _scratch(sizes: _AttentionSizes, dtype: jnp.dtype) -> list:
    """Return q twice, the result, the running softmax, which block is next, semaphores, K and V."""
    f32, heads, rows = jnp.float32, sizes.kv_heads, (sizes.tokens, sizes.kv_heads, sizes.group)
    return [
        pltpu.VMEM((2, *rows, sizes.k_dim), f32),
        pltpu.VMEM((*rows, sizes.v_dim), f32),
        pltpu.VMEM((heads, sizes.queries, sizes.v_dim), f32),
        pltpu.VMEM((heads, sizes.queries, 1), f32),
        pltpu.VMEM((heads, sizes.queries, LANES), f32),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((3, 2)),
        pltpu.SemaphoreType.DMA,
        pltpu.VMEM(sizes.kv_shape(sizes.k_dim), dtype),
        *([] if sizes.latent else [pltpu.VMEM(sizes.kv_shape(sizes.v_dim), dtype)]),
    ]


def _paged_attention_kernel(
    sizes: _AttentionSizes,
    with_sinks: bool,
    count_ref,
    start_ref,
    end_ref,
    seq_ref,
    position_ref,
    table_ref,
    _,
    q_hbm_ref,
    *refs,
):
    num_pages = 1 if sizes.latent else 2
    pages_refs, refs = refs[:num_pages], refs[num_pages:]
    sinks_ref, refs = (refs[0], refs[1:]) if with_sinks else (None, refs)
    out_hbm_ref, q_ref, out_ref, acc_ref, top_ref, total_ref, slot_ref, sems, out_sem = refs[:9]
    kv_refs = refs[9:]
    i, num_items = pl.program_id(0), count_ref[0]
    page_size, block = sizes.page_size, sizes.block

    def positions_of(item):
        """Return the first position that the item looks at, and its last token's."""
        last = position_ref[item] + end_ref[item] - start_ref[item] - 1
        if sizes.window is None:
            return jnp.int32(0), last
        return jnp.maximum(position_ref[item] - sizes.window + 1, 0), last

    def for_each_page(item, b, slot, do):
        """Call do on the DMAs of the pages of block b that the item looks at."""
        first, last = positions_of(item)
        begin = jnp.maximum(first, b * block) // page_size
        end = jnp.minimum(last, (b + 1) * block - 1) // page_size + 1

        @pl.loop(begin, end)
        def _(p):
            page = table_ref[seq_ref[item] * sizes.max_pages + p]
            target = pl.ds(pl.multiple_of(p * page_size - b * block, page_size), page_size)
            for which, (hbm_ref, kv_ref) in enumerate(zip(pages_refs, kv_refs, strict=True)):
                sem = sems.at[which, slot]
                do(pltpu.make_async_copy(hbm_ref.at[page], kv_ref.at[slot, target], sem))

    def for_each_token(item, do):
        """Call do on the DMAs of the item's rows of q."""

        @pl.loop(0, end_ref[item] - start_ref[item])
        def _(t):
            to_ref, sem = q_ref.at[item % 2, t], sems.at[2, item % 2]
            do(pltpu.make_async_copy(q_hbm_ref.at[start_ref[item] + t], to_ref, sem))

    def begin_item(item, slot):
        for_each_token(item, lambda copy: copy.start())
        for_each_page(item, positions_of(item)[0] // block, slot, lambda copy: copy.start())

    @pl.when((i == 0) & (num_items > 0))
    def _():
        slot_ref[0] = 0
        begin_item(i, 0)

    def attend(tokens: int):
        """Attend `tokens` tokens, the item's or one."""
        rows = tokens * sizes.group
        first, last = positions_of(i)
        for h in range(sizes.kv_heads):
            top = jnp.full((rows, 1), LOWEST, jnp.float32)
            top_ref[h, :rows] = top if sinks_ref is None else sinks_ref[h, :rows]
            lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
            sink = jnp.int32(0 if sinks_ref is None else 1)
            total_ref[h, :rows] = (lane < sink).astype(jnp.float32)
            acc_ref[h, :rows] = jnp.zeros((rows, sizes.v_dim), jnp.float32)
        for_each_token(i, lambda copy: copy.wait())
        end_block = last // block + 1

        def one_block(b, slot):
            @pl.when(b + 1 < end_block)
            def _():
                for_each_page(i, b + 1, 1 - slot, lambda copy: copy.start())

            @pl.when((b + 1 == end_block) & (i + 1 < num_items))
            def _():
                begin_item(i + 1, 1 - slot)

            for_each_page(i, b, slot, lambda copy: copy.wait())
            for h in range(sizes.kv_heads):
                at = (slot,) if sizes.one_head else (slot, slice(None), h)
                k = kv_refs[0][at]
                v = k[:, : sizes.v_dim] if sizes.latent else kv_refs[1][at]
                v_place = jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) + b * block
                # Beyond them lies what nobody has written.
                v = jnp.where((v_place >= first) & (v_place <= last), v, jnp.zeros_like(v))
                q = q_ref[i % 2, :tokens, h].reshape(rows, sizes.k_dim).astype(k.dtype)
                refs = (top_ref.at[h, :rows], total_ref.at[h, :rows], acc_ref.at[h, :rows])
                _attend_block(q, k, v, b * block, position_ref[i], sizes, *refs)
            return 1 - slot

        slot_ref[0] = jax.lax.fori_loop(first // block, end_block, one_block, slot_ref[0])
        for h in range(sizes.kv_heads):
            o = acc_ref[h, :rows] / _sum_of_lanes(total_ref[h, :rows])
            out_ref[:tokens, h] = o.reshape(tokens, sizes.group, sizes.v_dim)

    def for_each_result(do):
        @pl.loop(0, end_ref[i] - start_ref[i])
        def _(t):
            to_ref = out_hbm_ref.at[start_ref[i] + t]
            do(pltpu.make_async_copy(out_ref.at[t], to_ref, out_sem))

    @pl.when(i < num_items)
    def _():
        one = end_ref[i] - start_ref[i] == 1
        pl.when(one)(lambda: attend(1))
        if sizes.tokens > 1:
            pl.when(~one)(lambda: attend(sizes.tokens))
        for_each_result(lambda copy: copy.start())
        for_each_result(lambda copy: copy.wait())


def _attend_block(
    q, k, v, first_place, position, sizes: _AttentionSizes, top_ref, total_ref, acc_ref
):
    """Bring one block of positions into the running softmax of one kv head.

    Row r of q belongs to the token at `position` + r // group. total_ref sums by lane.
    """
    logits = _dot(q, k, 1) * jnp.float32(sizes.scale)
    key_position = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + first_place
    query_position = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0) // sizes.group + position
    seen = key_position <= query_position
    if sizes.window is not None:
        seen = seen & (key_position > query_position - sizes.window)
    logits = jnp.where(seen, logits, jnp.float32(LOWEST))
    old_top = top_ref[...]
    top = jnp.maximum(old_top, jnp.max(logits, axis=1, keepdims=True))
    p = jnp.where(seen, jnp.exp(logits - top), jnp.float32(0))
    decay = jnp.exp(old_top - top)
    top_ref[...] = top
    sums = functools.reduce(jnp.add, jnp.split(p, sizes.block // LANES, axis=1))
    total_ref[...] = total_ref[...] * decay + sums
    acc_ref[...] = acc_ref[...] * decay + _dot(p.astype(v.dtype), v, 0)


def _sum_of_lanes(x):
    """Return the sum of each row, paired in one way whatever the number of rows."""
    shift = LANES // 2
    while shift:
        x = x + pltpu.roll(x, shift, axis=1)
        shift //= 2
    return x[:, :1]


def _dot(x, y, contract: int):
    """Return x times y over x's columns and y's axis `contract`, in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision, preferred_element_type=jnp.float32)
