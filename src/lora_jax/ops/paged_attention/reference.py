"""Attention of tokens over their sequences' pages, in plain jnp: the meaning of the op."""

import jax
import jax.numpy as jnp

from lora_jax.ops.kv_rows import decoded
from lora_jax.ops.paged_attention.args import PagedAttentionArgs
from lora_jax.typing import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST


def paged_attention(
    args: PagedAttentionArgs,
) -> Float[Array, "tokens q_heads v_dim"]:
    """o[t, h] = sum_s p[s] v[s, g], p = softmax over s of scale * q[t, h] . k[s, g], g = h's group.

    s runs over positions max(0, p - window + 1)..p of the token's sequence, p = positions[t].
    A sink adds exp(sinks[h]) to the softmax's denominator. float32 throughout, rounded once.
    """
    q, k_pages, v_pages, block_tables = args.q, args.k_pages, args.v_pages, args.block_tables
    positions, num_tokens, sinks = args.positions, args.num_tokens, args.sinks
    v_dim, sliding_window = args.v_dim, args.sliding_window
    q_heads, kv_heads, f32 = q.shape[1], k_pages.shape[2], jnp.float32
    context = block_tables.shape[1] * k_pages.shape[1]
    places = jnp.arange(context, dtype=jnp.int32)

    def one_token(token):
        q_t, seq, position, t = token
        table = block_tables[seq]
        k = decoded(k_pages[table]).reshape(context, kv_heads, -1)
        v = k[..., :v_dim]
        if v_pages is not None:
            v = decoded(v_pages[table]).reshape(context, kv_heads, -1)
        first = 0 if sliding_window is None else position - sliding_window + 1
        seen = (places <= position) & (places >= first) & (t < num_tokens)
        q_g = q_t.reshape(kv_heads, q_heads // kv_heads, -1).astype(f32)
        logits = jnp.einsum("gqd,sgd->gqs", q_g, k, precision=HIGHEST) * f32(args.scale)
        logits = jnp.where(seen[None, None], logits, -jnp.inf)
        v = jnp.where(seen[:, None, None], v, f32(0))
        o = jnp.einsum("gqs,sgd->gqd", _softmax(logits, sinks), v, precision=HIGHEST)
        return o.reshape(q_heads, v_dim)

    index = jnp.arange(q.shape[0], dtype=jnp.int32)
    return jax.lax.map(one_token, (q, args.token_to_seq, positions, index)).astype(q.dtype)


def _softmax(
    logits: Float[Array, "kv_heads group context"], sinks: Float[Array, "q_heads"] | None
) -> Float[Array, "kv_heads group context"]:
    """Return softmax over the context, with the sinks in the denominator; all -inf gives 0."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(*logits.shape[:2], 1)
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, jnp.float32(0)))
    p = jnp.exp(logits - top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    return p / jnp.where(total == 0, jnp.float32(1), total)
