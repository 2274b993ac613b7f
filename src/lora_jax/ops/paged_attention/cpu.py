"""Attention over pages by the C++ kernel of ops/cpu/attention.h."""

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.ops.kv_rows import CODED
from lora_jax.ops.paged_attention.args import PagedAttentionArgs
from lora_jax.typing import Array, Float


def paged_attention(
    args: PagedAttentionArgs,
) -> Float[Array, "tokens q_heads v_dim"]:
    """Same result as the reference; the chunks of a sequence do not change a token's result."""
    build.require()
    q, sinks = args.q, args.sinks
    v = jnp.zeros((0, 0, 0, 0), args.k_pages.dtype) if args.v_pages is None else args.v_pages
    sinks = jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:2], args.v_dim), q.dtype)
    pages = "8_bits_" if args.k_pages.dtype == CODED else ""
    call = jax.ffi.ffi_call(f"lora_jax_attention_{pages}{q.dtype.name}", out)
    places = (args.block_tables, args.token_to_seq, args.positions, args.num_tokens)
    options = {"scale": np.float32(args.scale), "window": np.int64(args.sliding_window or 0)}
    return call(q, args.k_pages, v, *places, sinks, **options)
