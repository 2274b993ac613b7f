"""Work schedule of the Mosaic attention kernels: queries over blocks of positions.

A sequence is cut into chunks of positions that depend on the block tables' width alone, and a
token's result is the sum of its chunks in their order. Few tokens are cut: an item is a token and a
chunk, and `_gpu_combine` adds the parts up. The many tokens of prompts fill the GPU by themselves:
an item is some neighbours of one sequence and all of their chunks. The sums are the same.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from lora_jax.ops import hopper
from lora_jax.typing import Array, Float, Int

ALIGN = 8  # rows: of a copied tile, and of a query's first row
QUERIES = 16  # of an item of several tokens
MOST_PARTS = 8192  # tokens times chunks that are cut
MOST_CHUNKS = 64
CHUNK = 512  # positions, of which a chunk is a multiple
PROMPT_TOKENS = 256  # from here on a step holds prompts
LOWEST = -1e30  # stands for minus infinity where a difference of two must not be NaN
LOG2_E = 1 / math.log(2)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Division of a call into CTAs; only `block` and `chunk` change a result."""

    block: int  # positions of a step
    chunk: int  # positions that are summed up by themselves, in whole blocks
    tokens: int  # of an item at most
    cut: bool  # an item is one chunk
    stages: int  # blocks of positions on their way
    ctas: int  # per SM


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
    """Static parameters of the kernels' code."""

    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    page_size: int
    max_pages: int
    window: int | None
    scale: float
    latent: bool  # V is the first v_dim of K

    @property
    def group(self) -> int:
        """Return the query heads of one kv head."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Return the rows of a token's tile of queries, which begins at a multiple of 8."""
        offset = ALIGN - math.gcd(ALIGN, self.group)
        return -(-(offset + self.group) // ALIGN) * ALIGN

    def max_chunks(self, chunk: int) -> int:
        """Return into how many chunks the longest sequence is cut."""
        return -(-self.max_pages * self.page_size // chunk)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionSchedule:
    """Items: first token, tokens, sequence, position of the first token, first and end block of
    positions, and the number of its part if it is cut.
    """

    items: Int[Array, "items 7"]
    num_items: Int[Array, "1"]
    num_parts: Int[Array, "tokens"]  # of each token


def find_config(tokens: int, sizes: AttentionSizes) -> AttentionConfig:
    """Return the cut for so many tokens.

    Two CTAs an SM where they find room. On an H200, 64 x 2048 positions of Qwen3-30B: 72.8 us, of
    one CTA of twice the stages 76.9, of three of two stages 72.9; a prompt of 2048: 290 us, of one
    CTA and tiles of 32 queries 337.
    """
    chunk = _chunk(sizes)
    chunks = sizes.max_chunks(chunk)
    prompts = tokens >= PROMPT_TOKENS or tokens * chunks > MOST_PARTS
    together = max(1, QUERIES // sizes.rows) if prompts and not sizes.latent else 1
    width = sizes.k_dim + (0 if sizes.latent else sizes.v_dim)
    rows = sizes.rows * together
    config = AttentionConfig(64, chunk, together, not prompts, 0, 2)
    fixed = 2 * rows * (2 * sizes.k_dim + config.block + sizes.v_dim) + 4096
    for ctas in (2, 1):
        room = hopper.SHARED_BYTES // ctas - fixed
        stages = min(6, room // (2 * config.block * width))
        if stages >= 2:
            break
    return dataclasses.replace(config, stages=stages, ctas=ctas)


def _chunk(sizes: AttentionSizes) -> int:
    """Return the positions of a chunk.

    On an H200 a smallest chunk of 1024 takes 3 to 6% less for 64 x 2048 and 8 x 8192 positions of
    Qwen3-30B, and 40 to 50% more for 4 x 2048 and 1 x 8192 of it.
    """
    context = sizes.max_pages * sizes.page_size
    return -(-context // (MOST_CHUNKS * CHUNK)) * CHUNK


def make_schedule(
    token_to_seq: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    num_tokens: Int[Array, ""],
    sizes: AttentionSizes,
    config: AttentionConfig,
) -> AttentionSchedule:
    """Return the items of a step; all layers of one ask for the same, and XLA makes it once."""
    tokens, per_chunk = positions.shape[0], config.chunk // config.block
    index = jnp.arange(tokens, dtype=jnp.int32)
    live = index < num_tokens
    first, end = _first_block(positions, sizes, config.block), positions // config.block + 1
    first_chunk = first // per_chunk
    parts = jnp.where(live, (end - 1) // per_chunk + 1 - first_chunk, 0)
    count = _neighbours(token_to_seq, positions, num_tokens, config.tokens)
    # Tokens that are none have an item too where no second launch writes their zeros.
    items_of = parts if config.cut else (count > 0).astype(jnp.int32)
    ends = _running_sum(items_of)
    most = tokens * (sizes.max_chunks(config.chunk) if config.cut else 1)
    item = jnp.arange(most, dtype=jnp.int32)
    token = jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
    token = jnp.minimum(token, tokens - 1)
    part = item - (ends - items_of)[token]
    begin, last = first[token], (positions[token] + count[token] - 1) // config.block + 1
    if config.cut:
        chunk = (first_chunk[token] + part) * per_chunk
        begin, last = jnp.maximum(begin, chunk), jnp.minimum(last, chunk + per_chunk)
    last = jnp.where(live[token], last, begin)
    columns = (token, count[token], token_to_seq[token], positions[token], begin, last, part)
    return AttentionSchedule(jnp.stack(columns, axis=1), ends[-1:], parts)


def _neighbours(
    token_to_seq: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    num_tokens: Int[Array, ""],
    most: int,
) -> Int[Array, "tokens"]:
    """Return how many tokens share an item that begins at this one; 0 where none begins.

    They are neighbours of one sequence at consecutive positions, and do not reach over a multiple
    of `most` tokens.
    """
    token = jnp.arange(token_to_seq.shape[0], dtype=jnp.int32)
    follows = (token_to_seq[1:] == token_to_seq[:-1]) & (positions[1:] == positions[:-1] + 1)
    begins = jnp.pad(~follows, (1, 0), constant_values=True) | (token == num_tokens)
    begins = begins | (token % most == 0)
    count, joined = jnp.ones_like(token), jnp.ones_like(begins)
    for n in range(1, min(most, len(token))):
        joined = joined & jnp.pad(~begins[n:], (0, n))
        count = count + joined.astype(jnp.int32)
    return jnp.where(begins, count, 0)


def _running_sum(values: Int[Array, "n"]) -> Int[Array, "n"]:
    """Return the sums up to each place, of all pairs: XLA compiled cumsum of 2048 for 50 s."""
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    before = index[None, :] <= index[:, None]
    return jnp.sum(jnp.where(before, values[None, :], 0), axis=1, dtype=jnp.int32)


def _first_block(position: Int[Array, "n"], sizes: AttentionSizes, block: int) -> Int[Array, "n"]:
    """Return the block of the first position that a token sees."""
    if sizes.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - sizes.window + 1, 0) // block


def sink_tiles(
    sinks: Float[Array, "q_heads"] | None, sizes: AttentionSizes, tokens: int
) -> Float[Array, "kv_heads rows"]:
    """Return the logit that each row of a tile of queries adds to its sum, in powers of two."""
    shape = (sizes.kv_heads, sizes.rows * tokens)
    if sinks is None:
        return jnp.full(shape, LOWEST, jnp.float32)
    first = jnp.arange(sizes.kv_heads, dtype=jnp.int32) * sizes.group // ALIGN * ALIGN
    row = first[:, None] + jnp.arange(sizes.rows, dtype=jnp.int32)[None, :]
    logit = sinks.astype(jnp.float32) * jnp.float32(LOG2_E)
    tile = logit[jnp.minimum(row, sizes.q_heads - 1)]
    return jnp.tile(jnp.maximum(tile, jnp.float32(LOWEST)), (1, tokens))
