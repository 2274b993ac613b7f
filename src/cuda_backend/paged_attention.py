"""Attention over block tables by the Hopper kernels of csrc/paged_attention.

bfloat16 heads of 64 or 128 columns and latents go through tensor cores (stages.cuh): prompts by
whole warpgroups (prompts.cuh), pages in 8 bits with the bits that pages of the same values have
(coded.cuh). float32 and other heads go through multiply-adds (plain.cuh). A sequence is cut into
chunks of positions whose size depends on the block tables' width alone, so a token's result depends
on nothing but its own sequence.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.kv_rows import CODED
from lora_jax.ops.paged_attention.args import PagedAttentionArgs
from lora_jax.typing import Array, Float, Int, Num

MAX_TOKENS = 8192  # one CTA lists their units
BOX = 16  # positions that one copy brings; a page holds a whole number of them
CONSUMERS = 8  # warps; one owns a kv head and 16 rows (tokens x q heads of the kv head)
COLUMNS = 512  # of the kv heads that a CTA works on: its ring of pages needs room
PROMPT_TOKENS = 256  # from here on a step holds prompts
# Chunks of a sequence, and of tokens that memory is set aside for, to be worked on side by side.
# With fewer and longer ones a row of a model with room for 40960 positions had one CTA.
MOST_CHUNKS, PARTS = 512, 65536
MOST_LATENT_CHUNKS, LATENT_PARTS = 64, 8192
MOST_CUT, PROMPT_PARTS = 512, 16384  # of a step with prompts: tokens that are cut, and their chunks
TOKENS_OF_SEQUENCE = 2  # that decode in a step, as a rule
SHORT_CHUNK, CHUNK = 256, 512  # the former, for more CTAs, where contexts are SHORT_CONTEXT at most
SHORT_CONTEXT = 131072
LATENT_COLUMNS, LATENT_VALUES = 576, 512
LATENT_GROUPS = 2  # of 16 rows that share latents in a prompt
PLAIN_ROWS = (4, 8, 16)  # of a unit without tensor cores: as few as suffice
PLAIN_COLUMNS, PLAIN_VALUES = 576, 512


@dataclasses.dataclass(frozen=True)
class Cut:
    """Division of the work; only `chunk` changes a result."""

    chunk: int  # positions that are summed up by themselves
    max_chunks: int
    part_rows: int  # tokens that may be cut into chunks; the others' chunks follow each other
    cta_heads: int  # kv heads that one CTA works on
    token_groups: int  # of 16 rows
    unit_tokens: int  # that share pages
    many_tokens: int = 0  # that share them among many neighbours; 0: these are no case of their own


def cut_work(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    k_dim: int,
    context: int,
    *,
    seqs: int | None = None,
    coded: bool = False,
) -> Cut:
    """Return how to cut attention of `tokens` over up to `context` positions, for tensor cores.

    `seqs` is the most sequences that they are of; None: each may have its own.
    In a decode step one token takes whole pages. In a step with prompts many neighbours share the
    pages of one head, and others are a case of their own; where pages are `coded` and some tokens
    are not cut, all share those of two heads. Warps that turn `coded` latents leave no registers
    for a second group of rows.
    """
    chunks, latent = _chunks(tokens, k_dim, context, seqs), k_dim == LATENT_COLUMNS
    prompts = tokens >= PROMPT_TOKENS
    whole = chunks[2] < tokens  # sums of earlier chunks take room from pages on their way
    most = 1 if latent else min(2 if whole and coded else CONSUMERS, COLUMNS // k_dim)
    heads = max(n for n in range(1, most + 1) if kv_heads % n == 0)
    groups = (LATENT_GROUPS if prompts and not coded else 1) if latent else CONSUMERS // heads
    of_group = 16 // (q_heads // kv_heads)
    many = CONSUMERS * of_group if prompts and not (latent or coded) else 0
    return Cut(*chunks, heads, groups, groups * of_group, many)


def cut_plain_work(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    k_dim: int,
    context: int,
    *,
    seqs: int | None = None,
) -> Cut:
    """Return the same for the kernel without them, a CTA of which works on one kv head."""
    chunks, heads = _chunks(tokens, k_dim, context, seqs), q_heads // kv_heads
    wanted = PLAIN_ROWS[-1] if tokens >= PROMPT_TOKENS else heads
    return Cut(*chunks, 1, 1, max(1, _rows_for(wanted) // heads))


def _chunks(tokens: int, k_dim: int, context: int, seqs: int | None) -> tuple[int, int, int]:
    """Return the positions of a chunk, how many chunks there are, and the tokens that are cut.

    Few sequences have few tokens that decode, and memory is set aside for no more.
    """
    latent = k_dim == LATENT_COLUMNS
    smallest = SHORT_CHUNK if context <= SHORT_CONTEXT and not latent else CHUNK
    most, parts = (MOST_LATENT_CHUNKS, LATENT_PARTS) if latent else (MOST_CHUNKS, PARTS)
    chunk = -(-context // (most * smallest)) * smallest
    max_chunks = -(-context // chunk)
    decoding = tokens if seqs is None else min(tokens, TOKENS_OF_SEQUENCE * seqs)
    if decoding == tokens < PROMPT_TOKENS and tokens * max_chunks <= parts:
        return chunk, max_chunks, tokens
    most_cut = min(tokens - 1, decoding, MOST_CUT, PROMPT_PARTS // max_chunks)
    return chunk, max_chunks, max(1, most_cut)


def plain_rows(cut: Cut, q_heads: int, kv_heads: int) -> int:
    """Return the rows that a unit of this cut has room for."""
    return _rows_for(cut.unit_tokens * (q_heads // kv_heads))


def _rows_for(wanted: int) -> int:
    return next((rows for rows in PLAIN_ROWS if wanted <= rows), PLAIN_ROWS[-1])


def fits_tiles(
    dtype: jnp.dtype,
    q_heads: int,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    page_size: int,
    latent: bool,
) -> bool:
    """Return whether the kernels of the tensor cores serve these sizes."""
    if dtype != jnp.bfloat16 or q_heads // kv_heads > 16 or page_size % BOX:
        return False
    if latent:
        fits = kv_heads == 1 and k_dim == LATENT_COLUMNS
        return fits and v_dim % 64 == 0 and v_dim <= LATENT_VALUES
    return k_dim in (64, 128) and v_dim == k_dim


def check_support(dtype: jnp.dtype, tokens: int, k_dim: int, v_dim: int) -> None:
    """Raise Declined, saying why, for what no kernel serves."""
    op, step = "cuda paged_attention takes", 16 // dtype.itemsize
    if not 1 <= tokens <= MAX_TOKENS:
        raise Declined(f"{op} 1 to {MAX_TOKENS} tokens, not {tokens}")
    if k_dim % step or v_dim % step or k_dim > PLAIN_COLUMNS or v_dim > PLAIN_VALUES:
        raise Declined(
            f"{op} heads in steps of {step} columns, up to {PLAIN_COLUMNS} of K and "
            f"{PLAIN_VALUES} of V, not {k_dim} and {v_dim}"
        )


def paged_attention(
    args: PagedAttentionArgs,
) -> Float[Array, "tokens q_heads v_dim"]:
    """Same result as lora_jax.ops.paged_attention.

    Tensor cores take exponentials rounded to bfloat16 to V; without them all is float32.
    """
    q, v_pages, sinks = args.q, args.v_pages, args.sinks
    check_support(q.dtype, q.shape[0], q.shape[2], args.v_dim)
    ffi.require()
    latent = v_pages is None
    name, cut, extra = _kernel(q, args.k_pages, args.block_tables.shape, args.v_dim, latent)
    arrays = (
        q,
        args.k_pages,
        jnp.zeros((0,), args.k_pages.dtype) if latent else v_pages,
        args.block_tables,
        args.num_tokens,
        jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32),
    )
    window = args.sliding_window or 0
    units = _units(args.token_to_seq, args.positions, args.num_tokens, cut, window)
    attributes = {"chunk": cut.chunk, "window": window, **extra}
    call = jax.ffi.ffi_call(name, _results(q, args.v_dim, cut))
    whole = {key: np.int64(value) for key, value in attributes.items()}
    return call(*arrays, *units, scale=np.float32(args.scale), **whole)[0]


def _kernel(
    q: Float[Array, "tokens q_heads k_dim"],
    k_pages: Num[Array, "pages page_size kv_heads k_items"],
    tables: tuple[int, ...],
    v_dim: int,
    latent: bool,
) -> tuple[str, Cut, dict[str, int]]:
    """Return the call that serves these sizes, its cut, and the attributes that it alone has.

    `tables` are the sequences and pages of the block tables.
    """
    (tokens, q_heads, k_dim), (page_size, kv_heads) = q.shape, k_pages.shape[1:3]
    coded, (seqs, max_pages) = k_pages.dtype == CODED, tables
    work = (tokens, q_heads, kv_heads, k_dim, max_pages * page_size)
    if fits_tiles(q.dtype, q_heads, kv_heads, k_dim, v_dim, page_size, latent):
        cut = cut_work(*work, seqs=seqs, coded=coded)
        extra = {"cta_heads": cut.cta_heads, "token_groups": cut.token_groups}
        if coded:
            return "lora_jax_cuda_coded_attention", cut, extra
        return "lora_jax_cuda_paged_attention", cut, extra | {"many": int(cut.many_tokens > 0)}
    if coded:
        sizes = f"{q.dtype} heads of {k_dim} and {v_dim} columns, pages of {page_size}"
        raise Declined(f"cuda paged_attention does not take {sizes} where pages are in 8 bits")
    cut = cut_plain_work(*work, seqs=seqs)
    return "lora_jax_cuda_plain_attention", cut, {"rows": plain_rows(cut, q_heads, kv_heads)}


def _results(q: Array, v_dim: int, cut: Cut) -> list[jax.ShapeDtypeStruct]:
    """Return the result, and the parts of tokens that are cut into chunks."""
    tokens, q_heads, _ = q.shape
    parts = (cut.part_rows, cut.max_chunks, q_heads)
    return [
        jax.ShapeDtypeStruct((tokens, q_heads, v_dim), q.dtype),
        jax.ShapeDtypeStruct((*parts, v_dim), jnp.float32),
        jax.ShapeDtypeStruct((*parts, 2), jnp.float32),
    ]


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
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((most, 8), (cut.part_rows, 2), (2,))]
    call = jax.ffi.ffi_call("lora_jax_cuda_attention_units", shapes)
    sizes = {"unit_tokens": cut.unit_tokens, "many_tokens": cut.many_tokens}
    attributes = {**sizes, "chunk": cut.chunk, "window": window}
    return call(
        token_to_seq, positions, num_tokens, **{k: np.int64(v) for k, v in attributes.items()}
    )
