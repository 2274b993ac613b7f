"""Attention over pages by the C++ kernel of ops/cpu/attention.h."""

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.typing import Array, Float, Int


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
    """Same result as the reference; the chunks of a sequence do not change a token's result."""
    build.require()
    v = jnp.zeros((0, 0, 0, 0), q.dtype) if v_pages is None else v_pages
    sinks = jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:2], v_dim), q.dtype)
    call = jax.ffi.ffi_call(f"lora_jax_attention_{q.dtype.name}", out)
    arrays = (q, k_pages, v, block_tables, token_to_seq, positions, num_tokens, sinks)
    return call(*arrays, scale=np.float32(scale), window=np.int64(sliding_window or 0))
