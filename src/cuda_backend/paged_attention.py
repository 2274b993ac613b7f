"""Attention over block tables by the Hopper kernels of csrc/paged_attention.cuh.

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
TILE = 16  # positions of a stage; a page holds a whole number of them
CONSUMERS = 8  # warps; one owns a kv head, up to 128 columns of V and 16 rows
SLICE = 128
SHARED_BYTES = 232448 - 1024  # of a CTA, without its barriers
MOST_CHUNKS, SMALLEST_CHUNK = 16, 256


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the work is cut; nothing of it changes a result but `chunk`."""

    chunk: int  # positions that one CTA works through
    max_chunks: int
    cta_heads: int  # kv heads that one CTA works on
    token_groups: int
    unit_tokens: int


def cut_work(
    q_heads: int, kv_heads: int, k_dim: int, v_dim: int, latent: bool, context: int
) -> Cut:
    """Return how to cut attention over up to `context` positions.

    Raises:
        NotImplementedError: not even one kv head fits a CTA.
    """
    steps = -(-context // (MOST_CHUNKS * SMALLEST_CHUNK))
    chunk, slices = steps * SMALLEST_CHUNK, -(-v_dim // SLICE)
    for heads in range(min(kv_heads, CONSUMERS // slices), 0, -1):
        groups = CONSUMERS // (heads * slices)
        queries = groups * heads * 16 * (k_dim * 2 + 16)
        stage = heads * TILE * 2 * (k_dim + (0 if latent else v_dim))
        if kv_heads % heads == 0 and queries + 2 * stage <= SHARED_BYTES:
            unit_tokens = groups * (16 // (q_heads // kv_heads))
            return Cut(chunk, -(-context // chunk), heads, groups, unit_tokens)
    raise NotImplementedError(f"cuda paged_attention has no room for k_dim {k_dim}, v_dim {v_dim}")


def check_support(
    dtype: jnp.dtype,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    page_size: int,
) -> None:
    """Raise NotImplementedError, saying why, for what these kernels do not serve."""
    op = "cuda paged_attention takes"
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"{op} bfloat16, not {dtype}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise NotImplementedError(f"{op} 1 to {MAX_TOKENS} tokens, not {tokens}")
    if q_heads // kv_heads > 16:
        raise NotImplementedError(f"{op} up to 16 q heads per kv head, not {q_heads // kv_heads}")
    if k_dim % 64 or k_dim > 1024:
        raise NotImplementedError(f"{op} k_dim in steps of 64 up to 1024, not {k_dim}")
    if v_dim != 64 and (v_dim % SLICE or v_dim > CONSUMERS * SLICE):
        raise NotImplementedError(f"{op} v_dim 64 or in steps of {SLICE}, not {v_dim}")
    if page_size % TILE:
        raise NotImplementedError(f"{op} pages in steps of {TILE} positions, not {page_size}")


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
    check_support(q.dtype, tokens, q_heads, kv_heads, k_dim, v_dim, page_size)
    context = block_tables.shape[1] * page_size
    cut = cut_work(q_heads, kv_heads, k_dim, v_dim, v_pages is None, context)
    ffi.require()
    window = sliding_window or 0
    batch = (token_to_seq, positions, num_tokens)
    units = _units(*batch, cut, window)
    parts = (tokens, cut.max_chunks, q_heads)
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
        none if v_pages is None else v_pages,
        block_tables,
        *batch,
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
    """Return the units (token, number of tokens, chunk, position) and how many there are.

    All layers of a step ask for the same list, and XLA makes it once.
    """
    most = token_to_seq.shape[0] * cut.max_chunks
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((most, 4), (1,))]
    call = jax.ffi.ffi_call("lora_jax_cuda_attention_units", shapes)
    attributes = {"unit_tokens": cut.unit_tokens, "chunk": cut.chunk, "window": window}
    return call(
        token_to_seq, positions, num_tokens, **{k: np.int64(v) for k, v in attributes.items()}
    )
