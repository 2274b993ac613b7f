"""Inputs for tests and benchmarks of the ops: sizes of real models, and who asks for what.

Values are scaled so that results are of order one, whatever the sizes. The same seed gives the
same case.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from lora_jax.typing import Array, Float, Int, Num


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its ops see."""

    hidden: int
    intermediate: int  # of one expert where there are experts
    num_experts: int
    top_k: int
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int  # of the cache's V; smaller than k_dim with no V pages is MLA
    latent: bool = False
    sliding_window: int | None = None
    sinks: bool = False


MODELS = {
    "llama-100m": ModelShape(768, 2048, 1, 1, 12, 12, 64, 64),
    "llama-8b": ModelShape(4096, 14336, 1, 1, 32, 8, 128, 128),
    "mixtral-8x7b": ModelShape(4096, 14336, 8, 2, 32, 8, 128, 128),
    "qwen3-30b-a3b": ModelShape(2048, 768, 128, 8, 32, 4, 128, 128),
    "gpt-oss-20b": ModelShape(2880, 2880, 32, 4, 64, 8, 64, 64, sliding_window=128, sinks=True),
    "deepseek-v2-lite": ModelShape(2048, 1408, 64, 6, 16, 1, 576, 512, latent=True),
    "dbrx": ModelShape(6144, 10752, 16, 4, 48, 8, 128, 128),
    # Nothing is a multiple of a vector or of a tile.
    "odd": ModelShape(172, 100, 5, 2, 6, 3, 24, 24, sliding_window=7, sinks=True),
    "odd-latent": ModelShape(24, 43, 3, 2, 5, 1, 40, 24, latent=True),
    "tiny": ModelShape(64, 172, 4, 2, 8, 4, 8, 8),
}
POPULARITIES = ("identical", "uniform", "skewed", "distinct", "zipf", "none")


def popular(popularity: str, num_rows: int, num_ids: int, rng: np.random.Generator) -> np.ndarray:
    """Return i32 [num_rows]: the adapter or expert that each row asks for; -1 is none.

    identical: all ask for 0. uniform: any. skewed: half ask for 0. distinct: as many different ones
    as there are. zipf: the i-th with weight i^-1.2. Raises ValueError for another name.
    """
    if popularity == "identical":
        ids = np.zeros(num_rows)
    elif popularity == "uniform":
        ids = rng.integers(0, num_ids, num_rows)
    elif popularity == "skewed":
        ids = np.where(rng.random(num_rows) < 0.5, 0, rng.integers(0, num_ids, num_rows))
    elif popularity == "distinct":
        ids = rng.permutation(num_rows) % num_ids
    elif popularity == "zipf":
        weights = np.arange(1, num_ids + 1) ** -1.2
        ids = rng.choice(num_ids, num_rows, p=weights / weights.sum())
    elif popularity == "none":
        ids = np.full(num_rows, -1)
    else:
        raise ValueError(f"popularity {popularity!r} is not one of {', '.join(POPULARITIES)}")
    return ids.astype(np.int32)


def normal(rng: np.random.Generator, *shape: int, dtype: str, scale: float = 1.0) -> Array:
    """Return random normal numbers times `scale`, rounded to `dtype`."""
    values = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return jnp.asarray(values.astype(jnp.dtype(dtype)))  # rounded here: no program for each shape


@dataclasses.dataclass(frozen=True)
class GroupedCase:
    """Arguments of grouped_matmul. The last rows are in no group."""

    x: Float[Array, "rows d_in"]
    w: Float[Array, "groups d_out d_in"]
    group_sizes: Int[Array, "groups"]
    bias: Float[Array, "groups d_out"] | None


def grouped_case(
    num_rows: int,
    groups: int,
    d_out: int,
    d_in: int,
    *,
    popularity: str = "uniform",
    dtype: str = "float32",
    bias: bool = False,
    padding: int = 0,
    seed: int = 0,
) -> GroupedCase:
    """Return a case of num_rows rows in groups, with `padding` more rows after them."""
    rng = np.random.default_rng(seed)
    ids = popular(popularity, num_rows, groups, rng)
    sizes = np.bincount(ids[ids >= 0], minlength=groups).astype(np.int32)
    return GroupedCase(
        x=normal(rng, num_rows + padding, d_in, dtype=dtype),
        w=normal(rng, groups, d_out, d_in, dtype=dtype, scale=1 / math.sqrt(d_in)),
        group_sizes=jnp.asarray(sizes),
        bias=normal(rng, groups, d_out, dtype=dtype) if bias else None,
    )


@dataclasses.dataclass(frozen=True)
class LoraCase:
    """Arguments of lora_gemm, with `ranks` for the oracle."""

    y: Float[Array, "rows d_out"]
    x: Float[Array, "rows d_in"]
    a_pool: Num[Array, "a_rows a_items"]
    b_pool: Num[Array, "b_rows b_items"]
    entries: Int[Array, "slots 5"]
    scaling: Float[Array, "slots"]
    row_to_slot: Int[Array, "rows"]
    row_to_expert: Int[Array, "rows"] | None
    max_rank: int

    @property
    def arrays(self) -> tuple:
        """The positional arguments."""
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self)[:-1])


def lora_case(
    num_rows: int,
    d_out: int,
    d_in: int,
    *,
    ranks: tuple[int, ...] = (16, 8, 0, 64, 1),
    popularity: str = "uniform",
    num_experts: int = 0,
    shared_a: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> LoraCase:
    """Return a case of one slot per rank; num_experts 0 means a plain linear map."""
    rng = np.random.default_rng(seed)
    copies = max(1, num_experts)
    entries = np.zeros((len(ranks), 5), np.int32)
    a_rows = b_rows = 3  # rows of other modules come first
    for slot, rank in enumerate(ranks):
        a_stride = rank if num_experts and not shared_a else 0
        entries[slot] = a_rows, b_rows, rank, a_stride, rank if num_experts else 0
        a_rows += rank * (copies if a_stride else 1)
        b_rows += rank * copies
    experts = rng.integers(0, copies, num_rows).astype(np.int32)
    return LoraCase(
        y=normal(rng, num_rows, d_out, dtype=dtype),
        x=normal(rng, num_rows, d_in, dtype=dtype),
        a_pool=normal(rng, a_rows, d_in, dtype=dtype, scale=1 / math.sqrt(d_in)),
        b_pool=normal(rng, b_rows, d_out, dtype=dtype, scale=1 / math.sqrt(max(*ranks, 1))),
        entries=jnp.asarray(entries),
        scaling=normal(rng, len(ranks), dtype="float32"),
        row_to_slot=jnp.asarray(popular(popularity, num_rows, len(ranks), rng)),
        row_to_expert=jnp.asarray(experts) if num_experts else None,
        max_rank=max(*ranks, 1),
    )


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Arguments of paged_attention; `chunks` are the (sequence, start, count) of its tokens."""

    q: Float[Array, "tokens q_heads k_dim"]
    k_pages: Num[Array, "pages page_size kv_heads k_items"]
    v_pages: Num[Array, "pages page_size kv_heads v_items"] | None
    block_tables: Int[Array, "seqs max_pages"]
    token_to_seq: Int[Array, "tokens"]
    positions: Int[Array, "tokens"]
    num_tokens: Int[Array, ""]
    sinks: Float[Array, "q_heads"] | None
    sliding_window: int | None
    v_dim: int
    chunks: tuple[tuple[int, int, int], ...]

    @property
    def arrays(self) -> tuple:
        """The positional arguments."""
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self)[:7])

    @property
    def options(self) -> dict:
        """The keyword arguments."""
        scale = 1 / math.sqrt(self.q.shape[2])
        names = ("v_dim", "sliding_window", "sinks")
        return {"scale": scale, **{name: getattr(self, name) for name in names}}


def attention_case(
    model: ModelShape,
    chunks: tuple[tuple[int, int, int], ...],
    *,
    page_size: int = 4,
    dtype: str = "float32",
    padding: int = 0,
    seed: int = 0,
) -> AttentionCase:
    """Return a case whose tokens are, in order, `count` of each sequence from position `start`.

    Pages are scattered over the pool; what lies beyond a sequence's end is NaN, so that a kernel
    that looks there is found out.
    """
    rng = np.random.default_rng(seed)
    tables, written = _scattered_pages(_lengths(chunks), page_size, rng)
    unwritten = ~written[:, :, None, None]

    def filled(dim: int) -> Array:
        values = np.asarray(normal(rng, *written.shape, model.kv_heads, dim, dtype=dtype))
        return jnp.asarray(np.where(unwritten, np.array(np.nan, values.dtype), values))

    token_to_seq = [seq for seq, _, count in chunks for _ in range(count)]
    positions = [start + i for _, start, count in chunks for i in range(count)]
    tokens, pad = len(positions), [0] * padding
    return AttentionCase(
        q=normal(rng, tokens + padding, model.q_heads, model.k_dim, dtype=dtype),
        k_pages=filled(model.k_dim),
        v_pages=None if model.latent else filled(model.v_dim),
        block_tables=jnp.asarray(tables),
        token_to_seq=jnp.asarray(token_to_seq + pad, jnp.int32),
        positions=jnp.asarray(positions + pad, jnp.int32),
        num_tokens=jnp.int32(tokens),
        sinks=normal(rng, model.q_heads, dtype="float32") if model.sinks else None,
        sliding_window=model.sliding_window,
        v_dim=model.v_dim,
        chunks=chunks,
    )


def _lengths(chunks: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    """Return i64 [seqs]: the positions that each sequence has in the end."""
    lengths = np.zeros(max(seq for seq, _, _ in chunks) + 1, int)
    for seq, start, count in chunks:
        lengths[seq] = max(lengths[seq], start + count)
    return lengths


def _scattered_pages(
    lengths: np.ndarray, page_size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return block tables [seqs, max_pages] and which places [pages, page_size] are written."""
    max_pages = -(-int(lengths.max()) // page_size) + 1
    pages = len(lengths) * max_pages + 2
    tables = rng.permutation(pages)[: pages - 2].reshape(-1, max_pages).astype(np.int32)
    written = np.zeros((pages, page_size), bool)
    for table, length in zip(tables, lengths, strict=True):
        position = np.arange(length)
        written[table[position // page_size], position % page_size] = True
    return tables, written


@dataclasses.dataclass(frozen=True)
class MergeCase:
    """Arguments of merge."""

    w: Float[Array, "matrices d_out d_in"]
    a_pool: Float[Array, "a_rows d_in"]
    b_pool: Float[Array, "b_rows d_out"]
    sites: Int[Array, "matrices 3"]
    scaling: Float[Array, "matrices"]
    max_rank: int

    @property
    def arrays(self) -> tuple:
        """The positional arguments."""
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self)[:-1])


def merge_case(
    matrices: int,
    d_out: int,
    d_in: int,
    *,
    ranks: tuple[int, ...] = (8,),
    dtype: str = "float32",
    seed: int = 0,
) -> MergeCase:
    """Return a case in which matrix m has rank ranks[m % len(ranks)]."""
    rng = np.random.default_rng(seed)
    matrix_ranks = np.array([ranks[m % len(ranks)] for m in range(matrices)])
    starts = 3 + np.cumsum(matrix_ranks) - matrix_ranks  # rows of other modules come first
    rows, most = int(matrix_ranks.sum()) + 5, max(*matrix_ranks, 1)
    return MergeCase(
        w=normal(rng, matrices, d_out, d_in, dtype=dtype),
        a_pool=normal(rng, rows, d_in, dtype=dtype),
        b_pool=normal(rng, rows, d_out, dtype=dtype, scale=1 / math.sqrt(most)),
        sites=jnp.asarray(np.stack([starts, starts, matrix_ranks], 1).astype(np.int32)),
        scaling=normal(rng, matrices, dtype="float32"),
        max_rank=int(most),
    )
