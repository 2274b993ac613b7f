"""Attention over pages: a loop over (sequence, 16 tokens) and blocks of pages, portable JAX."""

import dataclasses

import jax
import jax.numpy as jnp

from lora_jax.ops.kv_rows import decoded
from lora_jax.ops.paged_attention.args import PagedAttentionArgs
from lora_jax.typing import Array, Float, Int, Num

HIGHEST = jax.lax.Precision.HIGHEST
BLOCK_TOKENS = 16
BLOCK_POSITIONS = 128
LOWEST = -1e30  # stands for minus infinity where a difference of two must not be NaN


@dataclasses.dataclass(frozen=True)
class _Pages:
    """The arguments that do not change over the loops, and the sizes of a block of pages."""

    k_pages: Num[Array, "pages page_size kv_heads k_items"]
    v_pages: Num[Array, "pages page_size kv_heads v_items"] | None
    block_tables: Int[Array, "seqs max_pages"]
    scale: float
    v_dim: int
    window: int | None

    @property
    def block_pages(self) -> int:
        return max(1, min(BLOCK_POSITIONS // self.k_pages.shape[1], self.block_tables.shape[1]))

    def read(self, seq: Int[Array, ""], block: Int[Array, ""]):
        """Return positions, K and V (float32) of one block of pages of a sequence."""
        page_size, kv_heads = self.k_pages.shape[1:3]
        page = block * self.block_pages + jnp.arange(self.block_pages, dtype=jnp.int32)
        last = self.block_tables.shape[1] - 1
        table = self.block_tables[seq, jnp.minimum(page, last)]
        n = self.block_pages * page_size
        k = decoded(self.k_pages[table]).reshape(n, kv_heads, -1)
        v = k[..., : self.v_dim]
        if self.v_pages is not None:
            v = decoded(self.v_pages[table]).reshape(n, kv_heads, -1)
        return block * n + jnp.arange(n, dtype=jnp.int32), k, v


def paged_attention(
    args: PagedAttentionArgs,
) -> Float[Array, "tokens q_heads v_dim"]:
    """Same result as the reference; time follows the tokens and their contexts."""
    q, token_to_seq, positions, sinks = args.q, args.token_to_seq, args.positions, args.sinks
    (tokens, q_heads, _), num_tokens, v_dim = q.shape, args.num_tokens, args.v_dim
    softmax = (args.scale, v_dim, args.sliding_window)
    pages = _Pages(args.k_pages, args.v_pages, args.block_tables, *softmax)
    size = min(BLOCK_TOKENS, tokens)
    starts, counts, num_blocks = _token_blocks(token_to_seq, num_tokens, size)
    lane = jnp.arange(size, dtype=jnp.int32)

    def one_block(i, out):
        token = jnp.minimum(starts[i] + lane, tokens - 1)
        real = lane < counts[i]
        position = jnp.where(real, positions[token], positions[token[0]])
        o = _attend(q[token], position, token_to_seq[token[0]], sinks, pages)
        return out.at[jnp.where(real, token, tokens)].set(o.astype(q.dtype), mode="drop")

    out = jnp.zeros((tokens, q_heads, v_dim), q.dtype)
    return jax.lax.fori_loop(0, num_blocks, one_block, out)


def _token_blocks(
    token_to_seq: Int[Array, "tokens"], num_tokens: Int[Array, ""], size: int
) -> tuple[Int[Array, "tokens"], Int[Array, "tokens"], Int[Array, ""]]:
    """Return (starts, counts, how many) of blocks of up to `size` real tokens of one sequence."""
    tokens = token_to_seq.shape[0]
    token = jnp.arange(tokens, dtype=jnp.int32)
    first = jnp.pad(token_to_seq[1:] != token_to_seq[:-1], (1, 0), constant_values=True)
    run_start = jax.lax.cummax(jnp.where(first, token, 0))
    begins = ((token - run_start) % size == 0) & (token < num_tokens)
    starts = jnp.nonzero(begins, size=tokens, fill_value=0)[0].astype(jnp.int32)
    stop = jnp.pad(jnp.where(first, token, tokens)[1:], (0, 1), constant_values=tokens)
    run_end = jnp.minimum(jax.lax.cummin(stop, reverse=True), num_tokens)
    counts = jnp.minimum(run_end[starts] - starts, size)
    return starts, counts, jnp.sum(begins, dtype=jnp.int32)


def _attend(
    q: Float[Array, "block q_heads k_dim"],
    position: Int[Array, "block"],
    seq: Int[Array, ""],
    sinks: Float[Array, "q_heads"] | None,
    pages: _Pages,
) -> Float[Array, "block q_heads v_dim"]:
    """Return the attention of a block of tokens of one sequence, in float32, by online softmax."""
    size, q_heads, k_dim = q.shape
    kv_heads = pages.k_pages.shape[2]
    f32 = jnp.float32
    q = q.reshape(size, kv_heads, q_heads // kv_heads, k_dim).astype(f32) * f32(pages.scale)
    first = jnp.zeros_like(position)
    if pages.window is not None:
        first = jnp.maximum(position - pages.window + 1, 0)
    block_positions = pages.block_pages * pages.k_pages.shape[1]

    def one_block(block, carry):
        top, total, acc = carry
        key_position, k, v = pages.read(seq, block)
        seen = (key_position[None] <= position[:, None]) & (key_position[None] >= first[:, None])
        logits = jnp.einsum("tgqd,sgd->tgqs", q, k, precision=HIGHEST)
        logits = jnp.where(seen[:, None, None], logits, f32(LOWEST))
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
        p = jnp.where(seen[:, None, None], jnp.exp(logits - new_top[..., None]), f32(0))
        v = jnp.where(jnp.any(seen, axis=0)[:, None, None], v, f32(0))
        decay = jnp.exp(top - new_top)
        acc = acc * decay[..., None] + jnp.einsum("tgqs,sgd->tgqd", p, v, precision=HIGHEST)
        return new_top, total * decay + jnp.sum(p, axis=-1), acc

    heads = q.shape[:3]
    top, total = jnp.full(heads, LOWEST, f32), jnp.zeros(heads, f32)
    if sinks is not None:
        top = jnp.broadcast_to(sinks.astype(f32).reshape(1, *heads[1:]), heads)
        total = jnp.ones(heads, f32)
    acc = jnp.zeros((*heads, pages.v_dim), f32)
    begin, end = jnp.min(first) // block_positions, jnp.max(position) // block_positions + 1
    _, total, acc = jax.lax.fori_loop(begin, end, one_block, (top, total, acc))
    return (acc / total[..., None]).reshape(size, q_heads, pages.v_dim)
