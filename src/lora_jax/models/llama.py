"""Llama, and the dense models that differ from it by config only: Mistral, Qwen2, Qwen3."""

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.config import ModelConfig
from lora_jax.models.sources import WeightRule
from lora_jax.models.weight_names import frame_weights, mlp_weights
from lora_jax.nn import adapter_sites
from lora_jax.nn.attention import Attention
from lora_jax.nn.decoder import AbstractCausalLM, DecoderLayer
from lora_jax.nn.layers import Mlp, RMSNorm


class Llama(AbstractCausalLM):
    """Grouped-query attention and a gated MLP in every layer."""

    @staticmethod
    def make_layer(
        config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> DecoderLayer:
        hidden, eps = config.hidden_size, config.norm_eps
        return DecoderLayer(
            RMSNorm(hidden, eps, dtype=dtype),
            Attention(config, layer, dtype=dtype, rngs=rngs),
            RMSNorm(hidden, eps, dtype=dtype),
            Mlp(
                hidden,
                config.intermediate_size,
                layer=layer,
                bias=config.mlp_bias,
                dtype=dtype,
                rngs=rngs,
            ),
        )

    @staticmethod
    def catalogue(config: ModelConfig) -> LoraCatalogue:
        layers = tuple(range(config.num_layers))
        modules = adapter_sites.attention_modules(config) + adapter_sites.head_modules(config)
        modules += adapter_sites.mlp_modules(config.hidden_size, config.intermediate_size, layers)
        rules = (
            *adapter_sites.attention_rules(),
            *adapter_sites.mlp_rules(),
            *adapter_sites.head_rules(),
        )
        return LoraCatalogue(
            config.model_type, config.num_layers, adapter_sites.by_name(modules), rules
        )

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        return (*frame_weights(), *mlp_weights())
