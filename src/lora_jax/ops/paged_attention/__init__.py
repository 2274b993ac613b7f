"""Attention of a flat list of tokens over the pages of their own sequences."""

import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.dispatch import (
    ANY,
    CPU,
    GPU,
    TPU,
    Implementation,
    Op,
    backend_kernel,
    lazy_kernel,
)
from lora_jax.ops.kv_rows import CODED, stored_dim
from lora_jax.ops.paged_attention import cpu, reference, xla
from lora_jax.ops.paged_attention.args import PagedAttentionArgs
from lora_jax.typing import Array, Float, Int, Num

__all__ = ["PagedAttentionArgs", "paged_attention"]

_GPU = lazy_kernel(f"{__name__}.pallas_gpu", "paged_attention")
_TPU = lazy_kernel(f"{__name__}.pallas_tpu", "paged_attention")


def _plain_pages(args: PagedAttentionArgs) -> str | None:
    return "reads pages of q's dtype, not in 8 bits" if args.k_pages.dtype == CODED else None


_PLAIN = (_plain_pages,)
PAGED_ATTENTION = Op(
    "paged_attention",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "paged_attention")),
        Implementation("pallas_gpu", GPU, _GPU, accepts=_PLAIN),
        Implementation("pallas_tpu", TPU, _TPU, accepts=_PLAIN),
        Implementation("ffi", CPU, cpu.paged_attention),
        Implementation("xla", ANY, xla.paged_attention),
        Implementation("reference", ANY, reference.paged_attention),
    ),
)


def paged_attention(
    q: Float[Array, "tokens q_heads k_dim"],
    k_pages: Num[Array, "pages page_size kv_heads k_items"],
    v_pages: Num[Array, "pages page_size kv_heads v_items"] | None,
    block_tables: Int[Array, "seqs max_pages"],
    token_to_seq: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    num_tokens: Int[Array, ""],
    *,
    scale: float,
    v_dim: int,
    sliding_window: int | None = None,
    sinks: Float[Array, "q_heads"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens q_heads v_dim"]:
    """softmax(scale * q k^T) v of token t over its sequence's positions up to positions[t].

    With a sliding window p attends to max(0, p - window + 1)..p. A head's sink is one more logit
    in the softmax's denominator. `v_pages` None: V is the first v_dim of K (MLA's latent). Tokens
    at or after num_tokens give 0. Pages of uint8 hold rows in 8 bits (ops.kv_rows).

    Raises:
        ValueError: a shape or dtype does not fit: indices are int32, q and pages float32 or
            bfloat16. On a CPU also, when it runs, a token outside of its block table.
    """
    _check(q, k_pages, v_pages, block_tables, v_dim, sliding_window)
    tokens, q_heads, k_dim = q.shape
    pages, page_size, kv_heads, _ = k_pages.shape
    k_items, v_items = (stored_dim(dim, k_pages.dtype) for dim in (k_dim, v_dim))
    checks.check_shapes(
        "paged_attention",
        k_pages=(tuple(k_pages.shape), (pages, page_size, kv_heads, k_items)),
        v_pages=(checks.shape_of(v_pages), (pages, page_size, kv_heads, v_items)),
        token_to_seq=(tuple(token_to_seq.shape), (tokens,)),
        positions=(tuple(positions.shape), (tokens,)),
        num_tokens=(tuple(num_tokens.shape), ()),
        sinks=(checks.shape_of(sinks), (q_heads,)),
    )
    places = {"token_to_seq": token_to_seq, "positions": positions, "num_tokens": num_tokens}
    checks.check_dtype("paged_attention", jnp.int32, block_tables=block_tables, **places)
    arrays = (q, k_pages, v_pages, block_tables, token_to_seq, positions, num_tokens, sinks)
    args = PagedAttentionArgs(*arrays, scale, v_dim, sliding_window)
    return PAGED_ATTENTION.call(implementation, args)


def _check(q, k_pages, v_pages, block_tables, v_dim, sliding_window) -> None:
    """Raise ValueError for ranks, dtypes and sizes that no implementation can take."""
    if q.ndim != 3 or k_pages.ndim != 4 or block_tables.ndim != 2:
        raise ValueError(
            f"paged_attention: q {q.shape} must be rank 3, k_pages {k_pages.shape} rank 4, "
            f"block_tables {block_tables.shape} rank 2"
        )
    if k_pages.dtype == CODED:
        checks.check_dtypes("paged_attention", q=q)
        if v_pages is not None:
            checks.check_dtype("paged_attention", CODED, v_pages=v_pages)
    else:
        checks.check_dtypes("paged_attention", q=q, k_pages=k_pages, v_pages=v_pages)
    q_heads, kv_heads = q.shape[1], k_pages.shape[2]
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"paged_attention: {q_heads} q heads over {kv_heads} kv heads")
    if v_pages is None and not 0 < v_dim <= q.shape[2]:
        raise ValueError(f"paged_attention: v_dim {v_dim} is not within k_dim {q.shape[2]}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"paged_attention: sliding_window {sliding_window} must be at least 1")
