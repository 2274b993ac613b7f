"""Attention over pages on a Hopper GPU by persistent Mosaic kernels.

A sequence is cut into chunks of positions; CTAs take (token, chunk, kv head) in turn, and a second
launch puts the chunks together. Where tokens are many, as in prompts, a CTA takes some neighbours
of one sequence through all chunks instead.

A token's result depends on its own sequence and the block tables' width alone.
"""

from lora_jax.ops import hopper
from lora_jax.ops.paged_attention._gpu_combine import combine
from lora_jax.ops.paged_attention._gpu_kernel import attend
from lora_jax.ops.paged_attention._gpu_plan import (
    ALIGN,
    Config,
    Sizes,
    find_config,
    make_plan,
    sink_tiles,
)
from lora_jax.typing import Array, Float, Int

MOST_GROUP = 16  # q heads of a kv head
MOST_COLUMNS = 576
PAGE = 64  # positions: pages of less divide it, others are divided by it


def paged_attention(
    q: Float[Array, "tokens q_heads k_dim"],
    k_pages: Float[Array, "pages page_size kv_heads k_dim"],
    v_pages: Float[Array, "pages page_size kv_heads v_dim"] | None,
    block_tables: Int[Array, "seqs max_pages"],
    token_to_seq: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    num_tokens: Int[Array, ""],
    sinks: Float[Array, "q_heads"] | None,
    scale: float,
    v_dim: int,
    sliding_window: int | None,
    *,
    config: Config | None = None,
    interpret: hopper.Interpret = None,
) -> Float[Array, "tokens q_heads v_dim"]:
    """Same result as the reference; weights of the softmax are rounded to bfloat16 before V.

    `interpret`: see hopper.require. Raises NotImplementedError for another machine or dtype, and
    for heads and pages that do not fill tiles.
    """
    _require(q, k_pages, v_dim, interpret)
    tokens, q_heads, k_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    latent, max_pages = v_pages is None, block_tables.shape[1]
    sizes = Sizes(
        q_heads, kv_heads, k_dim, v_dim, page_size, max_pages, sliding_window, scale, latent
    )
    config = config or find_config(tokens, sizes)
    plan = make_plan(token_to_seq, positions, num_tokens, sizes, config)
    flat = [p if p is None else p.reshape(-1, kv_heads * p.shape[-1]) for p in (k_pages, v_pages)]
    tiles = sink_tiles(sinks, sizes, config.tokens)
    rows = q.reshape(tokens * q_heads, k_dim)
    out = attend(rows, *flat, block_tables, tiles, plan, sizes, config, interpret)
    if config.cut:
        out = (combine(*out, tiles, plan, q.dtype, sizes, config, interpret),)
    return out[0].reshape(tokens, q_heads, v_dim)


def _require(q, k_pages, v_dim: int, interpret: hopper.Interpret) -> None:
    """Raise NotImplementedError, saying why, for what the kernels do not serve."""
    op = "paged_attention on Mosaic GPU takes"
    hopper.require("paged_attention", q.dtype, interpret)
    (tokens, q_heads, k_dim), (page_size, kv_heads) = q.shape, k_pages.shape[1:3]
    if tokens < 1 or q_heads % ALIGN or q_heads // kv_heads > MOST_GROUP:
        raise NotImplementedError(
            f"{op} q heads in steps of {ALIGN}, up to {MOST_GROUP} of a kv head, not {q_heads} of "
            f"{kv_heads}, and at least one token, not {tokens}"
        )
    if k_dim % hopper.COLUMNS or v_dim % hopper.COLUMNS or max(k_dim, v_dim) > MOST_COLUMNS:
        raise NotImplementedError(
            f"{op} heads in steps of {hopper.COLUMNS} columns up to {MOST_COLUMNS}, not {k_dim} "
            f"and {v_dim}"
        )
    if page_size % ALIGN or (PAGE % page_size and page_size % PAGE):
        raise NotImplementedError(
            f"{op} pages in steps of {ALIGN} positions that divide {PAGE} or are divided by it, "
            f"not {page_size}"
        )
