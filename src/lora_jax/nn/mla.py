"""Multi-head latent attention, absorbed: the cache keeps one latent per token, no K or V of heads.

Head h's key of a cached latent c is W_k[h] c and its value W_v[h] c (both are rows of kv_b_proj).
Instead of expanding the cache, W_k goes to the query and W_v to the output:
q . W_k c = (W_k^T q) . c and sum_s p_s W_v c_s = W_v sum_s p_s c_s, so that attention runs over
latents as one key-value head whose V is a prefix of K.
"""

import jax.numpy as jnp
from flax import nnx

from lora_jax.batch import ForwardBatch, ReadRows
from lora_jax.config import ModelConfig
from lora_jax.kv_cache import KVShape, LayerCache
from lora_jax.nn.attention import CosSin
from lora_jax.nn.layers import RMSNorm, make_linear, parameter
from lora_jax.nn.lora import AdapterRouting, add_lora
from lora_jax.ops.grouped_matmul import grouped_matmul
from lora_jax.ops.paged_attention import paged_attention
from lora_jax.ops.pages import write, write_in_place
from lora_jax.ops.reroute import RowMap, row_map
from lora_jax.ops.rotary import rotate
from lora_jax.typing import Array, Float, Int

LATENT_NORM_EPS = 1e-6  # of the norms over latents; the config's eps is for the hidden states


def latent_kv_shape(config: ModelConfig) -> KVShape:
    """Return what the cache keeps: one latent with its rotated key, and no V beside it."""
    width = config.latent.kv_lora_rank + config.latent.rope_dim
    return KVShape(config.num_layers, 1, width, 0)


class PerHead(nnx.Module):
    """y[t, h] = W[h] x[t, h] and each row's adapter at (module, layer), a head being an expert."""

    def __init__(
        self,
        heads: int,
        d_in: int,
        d_out: int,
        *,
        module: str,
        layer: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.module, self.layer = module, layer
        self.weight = parameter(rngs, (heads, d_out, d_in), ("heads", None, None), dtype)

    def __call__(
        self, x: Float[Array, "tokens heads d_in"], by_head: RowMap, routing: AdapterRouting
    ) -> Float[Array, "tokens heads d_out"]:
        """Return every head's map; `routing` is that of the rows sorted by head."""
        tokens, heads, d_in = x.shape
        flat = x.reshape(tokens * heads, d_in)[by_head.order]
        y = grouped_matmul(flat, self.weight[...], by_head.group_sizes)
        site = ((self.module,), self.layer, by_head.row_to_expert)
        (y,) = add_lora((y,), flat, routing, *site)
        return y[by_head.inverse].reshape(tokens, heads, -1)


def head_rows(tokens: int, heads: int, num_tokens: Int[Array, ""]) -> RowMap:
    """Return the (token, head) rows sorted by head; those of padding tokens are in no group."""
    head = jnp.arange(heads, dtype=jnp.int32)[None]
    return row_map(jnp.broadcast_to(head, (tokens, heads)), num_tokens, heads)


class LatentAttention(nnx.Module):
    """DeepSeek's attention: low-rank or plain q, latent kv, rope on dimensions of its own."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config, self.mla = config, config.latent
        mla, hidden, heads = config.latent, config.hidden_size, config.num_heads
        latent = mla.kv_lora_rank
        linear = make_linear(layer, dtype=dtype, rngs=rngs)

        def per_head(module: str, d_in: int, d_out: int) -> PerHead:
            return PerHead(heads, d_in, d_out, module=module, layer=layer, dtype=dtype, rngs=rngs)

        q_size, rank = heads * config.head_dim, mla.q_lora_rank
        plain = linear("q_proj", hidden, q_size, ("heads", "embed")) if rank is None else None
        self.q_proj = plain
        if rank is not None:
            self.q_a_proj = linear("q_a_proj", hidden, rank, ("latent", "embed"), config.qkv_bias)
            self.q_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS, dtype=dtype)
            self.q_b_proj = linear("q_b_proj", rank, q_size, ("heads", "latent"))
        kv_a = "kv_a_proj_with_mqa"
        kv_size, axes = latent + mla.rope_dim, ("latent", "embed")
        self.kv_a_proj_with_mqa = linear(kv_a, hidden, kv_size, axes, config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(latent, LATENT_NORM_EPS, dtype=dtype)
        self.absorb_k = per_head("kv_b_proj.k", mla.nope_dim, latent)
        self.absorb_v = per_head("kv_b_proj.v", latent, mla.v_dim)
        o_axes = ("attended", "heads")
        self.o_proj = linear("o_proj", heads * mla.v_dim, hidden, o_axes, config.o_bias)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        angles: CosSin,
        batch: ForwardBatch,
        cache: LayerCache,
        routing: AdapterRouting,
        read: ReadRows | None = None,
    ) -> tuple[Float[Array, "rows hidden"], LayerCache]:
        """Return the attention's output and the cache with this step's latents in it.

        The output is that of every token, or of the rows `read`.
        """
        heads = self.absorb_k.weight.shape[0]  # of this device
        by_head = head_rows(x.shape[0], heads, routing.num_rows)
        sorted_routing = routing.gathered(by_head.row_to_token, routing.num_rows * heads)
        q_nope, q_rope = jnp.split(self._query(x, routing), [self.mla.nope_dim], axis=-1)
        q_rope = rotate(q_rope, *angles, interleaved=True)
        q = jnp.concatenate([self.absorb_k(q_nope, by_head, sorted_routing), q_rope], axis=-1)
        latent = self._latent(x, angles, routing)
        q, cache = self._placed(q, latent, batch, cache, routing)
        attended = paged_attention(
            q,
            cache.k,
            None,
            batch.block_tables,
            batch.token_to_seq,
            batch.positions,
            batch.num_tokens,
            scale=self.config.attention_scale,
            v_dim=self.mla.kv_lora_rank,
        )
        out = self.absorb_v(attended, by_head, sorted_routing).reshape(x.shape[0], -1)
        if read is not None:
            out, routing = out[read.row_to_token], routing.of_read(read)
        return self.o_proj(out, routing), cache

    def _placed(
        self,
        q: Float[Array, "tokens heads width"],
        latent: Float[Array, "tokens 1 width"],
        batch: ForwardBatch,
        cache: LayerCache,
        routing: AdapterRouting,
    ) -> tuple[Float[Array, "tokens heads width"], LayerCache]:
        """Return q as attention wants it, and the cache with this step's latents in it."""
        places = batch.token_to_page_slot
        if cache.in_place:
            return write_in_place(q, cache.k, latent, None, None, places), cache
        # XLA crashes over an array of no values that goes through a shard_map as it is.
        no_v = cache.v if routing.split is None else jnp.zeros_like(cache.v)
        return q, LayerCache(k=write(cache.k, latent, places), v=no_v)

    def _query(
        self, x: Float[Array, "tokens hidden"], routing: AdapterRouting
    ) -> Float[Array, "tokens heads head_dim"]:
        if self.q_proj is not None:
            q = self.q_proj(x, routing)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, routing)), routing)
        return q.reshape(x.shape[0], -1, self.config.head_dim)

    def _latent(
        self, x: Float[Array, "tokens hidden"], angles: CosSin, routing: AdapterRouting
    ) -> Float[Array, "tokens 1 width"]:
        """Return the normed latent followed by the rotated key that all heads share."""
        compressed = self.kv_a_proj_with_mqa(x, routing)[:, None]
        latent, key = jnp.split(compressed, [self.mla.kv_lora_rank], axis=-1)
        key = rotate(key, *angles, interleaved=True)
        return jnp.concatenate([self.kv_a_layernorm(latent), key], axis=-1)
