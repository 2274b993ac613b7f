"""Attention over block tables by the Hopper kernels of csrc/attention_stages.cuh.

A sequence is cut into chunks of positions whose size depends on the block tables' width alone, so
a token's result depends on nothing but its own sequence.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.typing import Array, Float, Int

MAX_TOKENS = 8192  # one CTA lists their units
BOX = 16  # positions that one copy brings; a page holds a whole number of them
CONSUMERS = 8  # warps; one owns a kv head and 16 rows (tokens x q heads of the kv head)
COLUMNS = 512  # of the kv heads that a CTA works on: its ring of pages needs room
PROMPT_TOKENS = 256  # from here on a step holds prompts
PARTS = 8192  # chunks of tokens that memory is set aside for, to be worked on side by side
MOST_CHUNKS = 64
SHORT_CHUNK, CHUNK = 256, 512  # the former, for more CTAs, where contexts are SHORT_CONTEXT at most
SHORT_CONTEXT = 4096
LATENT_COLUMNS, LATENT_VALUES = 576, 512
LATENT_GROUPS = 2  # of 16 rows that share latents in a prompt


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the work is cut; nothing of it changes a result but `chunk`."""

    chunk: int  # positions that are summed up by themselves
    max_chunks: int
    cta_heads: int  # kv heads that one CTA works on
    token_groups: int  # of 16 rows
    unit_tokens: int  # that share pages
    part_rows: int  # tokens that may be cut into chunks; the others' chunks follow each other


def cut_work(tokens: int, q_heads: int, kv_heads: int, k_dim: int, context: int) -> Cut:
    """Return how to cut attention of `tokens` over up to `context` positions.

    In a prompt many tokens share the pages of few heads, in a decode step one token takes whole
    pages.
    """
    latent = k_dim == LATENT_COLUMNS
    smallest = SHORT_CHUNK if context <= SHORT_CONTEXT and not latent else CHUNK
    chunk = -(-context // (MOST_CHUNKS * smallest)) * smallest
    max_chunks = -(-context // chunk)
    prompts = tokens >= PROMPT_TOKENS or tokens * max_chunks > PARTS
    part_rows = max(1, min(tokens - 1, PARTS // max_chunks)) if prompts else tokens
    most = 1 if latent else min(2 if prompts else CONSUMERS, COLUMNS // k_dim)
    heads = max(n for n in range(1, most + 1) if kv_heads % n == 0)
    groups = (LATENT_GROUPS if prompts else 1) if latent else CONSUMERS // heads
    unit_tokens = groups * (16 // (q_heads // kv_heads))
    return Cut(chunk, max_chunks, heads, groups, unit_tokens, part_rows)


def check_support(
    dtype: jnp.dtype,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    page_size: int,
    latent: bool,
) -> None:
    """Raise NotImplementedError, saying why, for what these kernels do not serve."""
    op = "cuda paged_attention takes"
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"{op} bfloat16, not {dtype}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise NotImplementedError(f"{op} 1 to {MAX_TOKENS} tokens, not {tokens}")
    if q_heads // kv_heads > 16:
        raise NotImplementedError(f"{op} up to 16 q heads per kv head, not {q_heads // kv_heads}")
    if latent and (kv_heads > 1 or k_dim != LATENT_COLUMNS or v_dim % 64 or v_dim > LATENT_VALUES):
        raise NotImplementedError(
            f"{op} one latent of {LATENT_COLUMNS} with V in steps of 64 up to {LATENT_VALUES}, "
            f"not {kv_heads} of {k_dim} with {v_dim}"
        )
    if not latent and (k_dim not in (64, 128) or v_dim != k_dim):
        raise NotImplementedError(f"{op} heads of 64 or 128 columns, not {k_dim} and {v_dim}")
    if page_size % BOX:
        raise NotImplementedError(f"{op} pages in steps of {BOX} positions, not {page_size}")


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
) -> Float[Array, "tokens q_heads v_dim"]:
    """What lora_jax.ops.paged_attention says; exponentials are rounded to bfloat16 before V."""
    tokens, q_heads, k_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    latent = v_pages is None
    check_support(q.dtype, tokens, q_heads, kv_heads, k_dim, v_dim, page_size, latent)
    context = block_tables.shape[1] * page_size
    cut = cut_work(tokens, q_heads, kv_heads, k_dim, context)
    ffi.require()
    window = sliding_window or 0
    units = _units(token_to_seq, positions, num_tokens, cut, window)
    parts = (cut.part_rows, cut.max_chunks, q_heads)
    shapes = [
        jax.ShapeDtypeStruct((tokens, q_heads, v_dim), q.dtype),
        jax.ShapeDtypeStruct((*parts, v_dim), jnp.float32),
        jax.ShapeDtypeStruct((*parts, 2), jnp.float32),
    ]
    none = jnp.zeros((0,), q.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_paged_attention", shapes)
    return call(
        q,
        k_pages,
        none if latent else v_pages,
        block_tables,
        num_tokens,
        none.astype(jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        *units,
        scale=np.float32(scale),
        chunk=np.int64(cut.chunk),
        window=np.int64(window),
        cta_heads=np.int64(cut.cta_heads),
        token_groups=np.int64(cut.token_groups),
    )[0]


def _units(
    token_to_seq: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    num_tokens: Int[Array, ""],
    cut: Cut,
    window: int,
) -> Sequence[Array]:
    """Return the units, the tokens that are cut into chunks, and how many there are of both.

    All layers of a step ask for the same list, and XLA makes it once.
    """
    most = token_to_seq.shape[0] + cut.part_rows * cut.max_chunks
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((most, 8), (cut.part_rows, 2), (1,))]
    call = jax.ffi.ffi_call("lora_jax_cuda_attention_units", shapes)
    attributes = {"unit_tokens": cut.unit_tokens, "chunk": cut.chunk, "window": window}
    return call(
        token_to_seq, positions, num_tokens, **{k: np.int64(v) for k, v in attributes.items()}
    )
