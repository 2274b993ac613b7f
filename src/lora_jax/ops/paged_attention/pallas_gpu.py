"""Attention over pages on a Hopper GPU by persistent Mosaic kernels.

A sequence is cut into chunks of positions; CTAs take (token, chunk, kv head) in turn, and a second
launch puts the chunks together. Where tokens are many, as in prompts, a CTA takes some neighbours
of one sequence through all chunks instead.

A token's result depends on its own sequence and the block tables' width alone.
"""

from lora_jax.ops import hopper
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.paged_attention._gpu_combine import combine
from lora_jax.ops.paged_attention._gpu_kernel import attend
from lora_jax.ops.paged_attention._gpu_schedule import (
    ALIGN,
    AttentionConfig,
    AttentionSizes,
    find_config,
    make_schedule,
    sink_tiles,
)
from lora_jax.ops.paged_attention.args import PagedAttentionArgs
from lora_jax.typing import Array, Float

MOST_GROUP = 16  # q heads of a kv head
MOST_COLUMNS = 576
PAGE = 64  # positions: pages of less divide it, others are divided by it


def paged_attention(
    args: PagedAttentionArgs,
    *,
    config: AttentionConfig | None = None,
    interpret: hopper.Interpret = None,
) -> Float[Array, "tokens q_heads v_dim"]:
    """Same result as the reference; weights of the softmax are rounded to bfloat16 before V.

    `interpret`: see hopper.require. Raises Declined for another machine or dtype, and
    for heads and pages that do not fill tiles.
    """
    q, k_pages, v_pages, v_dim = args.q, args.k_pages, args.v_pages, args.v_dim
    block_tables, sinks = args.block_tables, args.sinks
    _require(q, k_pages, v_dim, interpret)
    tokens, q_heads, k_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    heads, pages = (q_heads, kv_heads, k_dim, v_dim), (page_size, block_tables.shape[1])
    sizes = AttentionSizes(*heads, *pages, args.sliding_window, args.scale, v_pages is None)
    config = config or find_config(tokens, sizes)
    schedule = make_schedule(args.token_to_seq, args.positions, args.num_tokens, sizes, config)
    flat = [p if p is None else p.reshape(-1, kv_heads * p.shape[-1]) for p in (k_pages, v_pages)]
    tiles = sink_tiles(sinks, sizes, config.tokens)
    rows = q.reshape(tokens * q_heads, k_dim)
    out = attend(rows, *flat, block_tables, tiles, schedule, sizes, config, interpret)
    if config.cut:
        out = (combine(*out, tiles, schedule, q.dtype, sizes, config, interpret),)
    return out[0].reshape(tokens, q_heads, v_dim)


def _require(q, k_pages, v_dim: int, interpret: hopper.Interpret) -> None:
    """Raise Declined, saying why, for what the kernels do not serve."""
    op = "paged_attention on Mosaic GPU takes"
    hopper.require("paged_attention", q.dtype, interpret)
    (tokens, q_heads, k_dim), (page_size, kv_heads) = q.shape, k_pages.shape[1:3]
    if tokens < 1 or q_heads % ALIGN or q_heads // kv_heads > MOST_GROUP:
        raise Declined(
            f"{op} q heads in steps of {ALIGN}, up to {MOST_GROUP} of a kv head, not {q_heads} of "
            f"{kv_heads}, and at least one token, not {tokens}"
        )
    if k_dim % hopper.COLUMNS or v_dim % hopper.COLUMNS or max(k_dim, v_dim) > MOST_COLUMNS:
        raise Declined(
            f"{op} heads in steps of {hopper.COLUMNS} columns up to {MOST_COLUMNS}, not {k_dim} "
            f"and {v_dim}"
        )
    if page_size % ALIGN or (PAGE % page_size and page_size % PAGE):
        raise Declined(
            f"{op} pages in steps of {ALIGN} positions that divide {PAGE} or are divided by it, "
            f"not {page_size}"
        )
