"""Attention of whole rows of text as dense einsums, with a gradient: grouped-query and latent."""

from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.finetune.lora_params import LoraDelta, for_each
from lora_jax.nn.attention import Attention, CosSin
from lora_jax.nn.decoder import AttentionLike
from lora_jax.nn.layers import Linear
from lora_jax.nn.mla import LatentAttention, PerHead
from lora_jax.ops.grouped_matmul import QUANTISED
from lora_jax.ops.rotary import rotate
from lora_jax.typing import Array, Bool, Float


def product(equation: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
    """Return einsum(equation, x, w) with a frozen weight, which may be quantised.

    A quantised weight is made plain here and once more for the gradient of x, and kept in neither.
    """
    if not isinstance(w, QUANTISED):
        return jnp.einsum(equation, x, w)
    return jax.checkpoint(lambda x, w: jnp.einsum(equation, x, w.plain()))(x, w)


def linear(
    layer: Linear, x: Float[Array, "tokens d_in"], lora: LoraDelta | None
) -> Float[Array, "tokens d_out"]:
    """W x + b, plus what is trained at this site."""
    y = product("ti,oi->to", x, layer.weight[...])
    if layer.bias is not None:
        y = y + layer.bias[...][None]
    delta = lora.dense(x, layer.module, layer.layer) if lora and layer.module else None
    return y if delta is None else y + delta


def attend(
    attn: AttentionLike,
    x: Float[Array, "tokens hidden"],
    angles: CosSin,
    visible: Bool[Array, "rows length length"],
    lora: LoraDelta | None,
) -> Float[Array, "tokens hidden"]:
    """Attention of every place over the visible places of its row.

    Raises ValueError naming a kind of attention that this pass does not do.
    """
    if isinstance(attn, Attention):
        return grouped_attention(attn, x, angles, visible, lora)
    if isinstance(attn, LatentAttention):
        return latent_attention(attn, x, angles, visible, lora)
    raise ValueError(f"training does not support {type(attn).__name__}")


def grouped_attention(
    attn: Attention,
    x: Float[Array, "tokens hidden"],
    angles: CosSin,
    visible: Bool[Array, "rows length length"],
    lora: LoraDelta | None,
) -> Float[Array, "tokens hidden"]:
    """Grouped-query attention of every place over the visible places of its row."""
    config, (rows, length, _) = attn.config, visible.shape
    kv_heads, head_dim = config.num_kv_heads, config.head_dim

    def heads(projection: Linear, norm) -> Float[Array, "tokens heads head_dim"]:
        y = linear(projection, x, lora)
        if config.clip_qkv is not None:
            y = jnp.clip(y, -config.clip_qkv, config.clip_qkv)
        y = y.reshape(rows * length, -1, head_dim)
        return y if norm is None else norm(y)

    q = rotate(heads(attn.q_proj, attn.q_norm), *angles)
    k = rotate(heads(attn.k_proj, attn.k_norm), *angles)
    q = q.reshape(rows, length, kv_heads, -1, head_dim)
    k = k.reshape(rows, length, kv_heads, head_dim)
    v = heads(attn.v_proj, None).reshape(rows, length, kv_heads, head_dim)
    if attn.window is not None:
        position = jnp.arange(length, dtype=jnp.int32)
        visible = visible & (position[:, None] - position[None, :] < attn.window)[None]
    logits = jnp.einsum("btgqd,bsgd->bgqts", q, k) * config.attention_scale
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
    sinks = None if attn.sinks is None else attn.sinks[...].reshape(kv_heads, -1)
    out = jnp.einsum("bgqts,bsgd->btgqd", softmax(logits, sinks), v)
    return linear(attn.o_proj, out.reshape(rows * length, -1), lora)


def latent_attention(
    attn: LatentAttention,
    x: Float[Array, "tokens hidden"],
    angles: CosSin,
    visible: Bool[Array, "rows length length"],
    lora: LoraDelta | None,
) -> Float[Array, "tokens hidden"]:
    """DeepSeek's attention of every place, absorbed as it is served (see lora_jax.nn.mla)."""
    mla, (rows, length, _) = attn.mla, visible.shape
    if attn.q_proj is not None:
        query = linear(attn.q_proj, x, lora)
    else:
        query = linear(attn.q_b_proj, attn.q_a_layernorm(linear(attn.q_a_proj, x, lora)), lora)
    query = query.reshape(rows * length, attn.config.num_heads, -1)
    nope, turned = jnp.split(query, [mla.nope_dim], axis=-1)
    turned = rotate(turned, *angles, interleaved=True)
    q = jnp.concatenate([per_head(attn.absorb_k, nope, lora), turned], axis=-1)
    latent, key = jnp.split(linear(attn.kv_a_proj_with_mqa, x, lora), [mla.kv_lora_rank], axis=-1)
    latent = attn.kv_a_layernorm(latent)
    key = rotate(key[:, None], *angles, interleaved=True)[:, 0]
    k = jnp.concatenate([latent, key], axis=-1).reshape(rows, length, -1)
    q, v = q.reshape(rows, length, -1, q.shape[-1]), latent.reshape(rows, length, -1)
    logits = jnp.einsum("bthd,bsd->bhts", q, k) * attn.config.attention_scale
    seen = jax.nn.softmax(jnp.where(visible[:, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bhts,bsd->bthd", seen, v).reshape(rows * length, -1, mla.kv_lora_rank)
    return linear(attn.o_proj, per_head(attn.absorb_v, out, lora).reshape(rows * length, -1), lora)


def per_head(
    layer: PerHead, x: Float[Array, "tokens heads d_in"], lora: LoraDelta | None
) -> Float[Array, "tokens heads d_out"]:
    """W_h x_h, plus what is trained at this site: there, a head is an expert."""
    y = jnp.einsum("thi,hoi->tho", x, layer.weight[...])
    site = lora.sites.get((layer.module, layer.layer)) if lora else None
    if site is None:
        return y
    h = jnp.einsum("thi,hri->thr", x, for_each(site.a, x.shape[1]))
    return y + jnp.einsum("thr,hro->tho", h, for_each(site.b, x.shape[1])) * site.scaling


def softmax(
    logits: Float[Array, "rows kv_heads group length length"],
    sinks: Float[Array, "kv_heads group"] | None,
) -> Float[Array, "rows kv_heads group length length"]:
    """Return softmax over the last axis, with each head's sink in the denominator."""
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    column = jnp.broadcast_to(sinks[None, :, :, None, None], (*logits.shape[:-1], 1))
    with_sink = jnp.concatenate([logits, column.astype(logits.dtype)], axis=-1)
    return jax.nn.softmax(with_sink, axis=-1)[..., :-1]
