"""Grouped-query attention over the pages of every token's own sequence."""

import jax.numpy as jnp
from flax import nnx

from lora_jax.batch import ForwardBatch
from lora_jax.config import ModelConfig
from lora_jax.kv_cache import LayerCache, write
from lora_jax.nn import rope
from lora_jax.nn.layers import Linear, RMSNorm, constant_parameter, linears
from lora_jax.nn.lora import Rows
from lora_jax.ops.paged_attention import paged_attention
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

        def linear(module: str, d_in: int, d_out: int, axes: tuple[str, str], bias: bool) -> Linear:
            return Linear(
                d_in,
                d_out,
                module=module,
                layer=layer,
                axes=axes,
                bias=bias,
                dtype=dtype,
                rngs=rngs,
            )

        self.q_proj = linear("q_proj", hidden, q_size, ("heads", "embed"), config.qkv_bias)
        self.k_proj = linear("k_proj", hidden, kv_size, ("kv_heads", "embed"), config.qkv_bias)
        self.v_proj = linear("v_proj", hidden, kv_size, ("kv_heads", "embed"), config.qkv_bias)
        self.o_proj = linear("o_proj", q_size, hidden, ("embed", "heads"), config.o_bias)
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
        rows: Rows,
    ) -> tuple[Float[Array, "tokens hidden"], LayerCache]:
        """Return the attention's output and the cache with this step's K and V in it."""
        q = self._heads(self.q_proj(x, rows), self.q_norm)
        k, v = linears((self.k_proj, self.v_proj), x, rows)
        k, v = self._heads(k, self.k_norm), self._heads(v, None)
        q, k = rope.rotate(q, *angles), rope.rotate(k, *angles)
        cache = LayerCache(
            k=write(cache.k, k, batch.token_to_page_slot),
            v=write(cache.v, v, batch.token_to_page_slot),
        )
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
        return self.o_proj(out.reshape(x.shape[0], -1), rows), cache

    def _heads(
        self, y: Float[Array, "tokens width"], norm: RMSNorm | None
    ) -> Float[Array, "tokens heads head_dim"]:
        """Split into heads after the clip, with the norm over each head."""
        if self.config.clip_qkv is not None:
            limit = jnp.asarray(self.config.clip_qkv, y.dtype)
            y = jnp.clip(y, -limit, limit)
        heads = y.reshape(y.shape[0], -1, self.config.head_dim)
        return heads if norm is None else norm(heads)
