"""Grouped-query attention over the pages of every token's own sequence."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from lora_jax.batch import ForwardBatch, ReadRows
from lora_jax.config import ModelConfig
from lora_jax.kv_cache import LayerCache
from lora_jax.nn.layers import RMSNorm, apply_linears, constant_parameter, make_linear
from lora_jax.nn.lora import AdapterRouting
from lora_jax.ops.paged_attention import paged_attention
from lora_jax.ops.place_heads import PlaceHeadsArgs, place_heads
from lora_jax.typing import Array, Float

CosSin = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]


class Attention(nnx.Module):
    """q, k, v, rotary embedding, pages, o; with the config's biases, head norms, clip and window.

    `sinks` adds GPT-OSS's learned logit per head to the softmax's denominator.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        sinks: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.window = config.sliding_windows[layer]
        hidden, head = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
        linear = make_linear(layer, dtype=dtype, rngs=rngs)
        self.q_proj = linear("q_proj", hidden, q_size, ("heads", "embed"), config.qkv_bias)
        self.k_proj = linear("k_proj", hidden, kv_size, ("kv_heads", "embed"), config.qkv_bias)
        self.v_proj = linear("v_proj", hidden, kv_size, ("kv_heads", "embed"), config.qkv_bias)
        self.o_proj = linear("o_proj", q_size, hidden, ("attended", "heads"), config.o_bias)
        self.q_norm = RMSNorm(head, config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head, config.norm_eps, dtype=dtype) if config.qk_norm else None
        wide, heads = jnp.dtype(jnp.float32), (config.num_heads,)
        self.sinks = constant_parameter(0.0, heads, ("heads",), wide) if sinks else None

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        angles: CosSin,
        batch: ForwardBatch,
        cache: LayerCache,
        routing: AdapterRouting,
        read: ReadRows | None = None,
    ) -> tuple[Float[Array, "rows hidden"], LayerCache]:
        """Return the attention's output and the cache with this step's K and V in it.

        The output is that of every token, or of the rows `read`.
        """
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self._heads(y) for y in apply_linears(maps, x, routing))
        q, cache = self._placed(q, k, v, angles, batch, cache)
        out = paged_attention(
            q,
            cache.k,
            cache.v,
            batch.block_tables,
            batch.token_to_seq,
            batch.positions,
            batch.num_tokens,
            scale=self.config.attention_scale,
            v_dim=self.config.head_dim,
            sliding_window=self.window,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        out = out.reshape(x.shape[0], -1)
        if read is not None:
            out, routing = out[read.row_to_token], routing.of_read(read)
        return self.o_proj(out, routing), cache

    def _heads(self, y: Float[Array, "tokens width"]) -> Float[Array, "tokens heads head_dim"]:
        """Split into heads after the clip."""
        if self.config.clip_qkv is not None:
            limit = jnp.asarray(self.config.clip_qkv, y.dtype)
            y = jnp.clip(y, -limit, limit)
        return y.reshape(y.shape[0], -1, self.config.head_dim)

    def _placed(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        angles: CosSin,
        batch: ForwardBatch,
        cache: LayerCache,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], LayerCache]:
        """Return q as attention wants it, and the cache with this step's K and V in it."""
        scales, eps = None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            scales, eps = (self.q_norm.weight[...], self.k_norm.weight[...]), self.q_norm.eps
        pages = cache.k, cache.v, batch.token_to_page_slot
        how = eps, cache.in_place, batch.num_tokens
        args = PlaceHeadsArgs(q, k, v, *angles, scales, *pages, *how)
        q, k, v = place_heads(args)
        return q, dataclasses.replace(cache, k=k, v=v)
