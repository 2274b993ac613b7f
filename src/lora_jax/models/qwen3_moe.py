"""Qwen3-MoE: attention with a norm per head, and experts in all layers but the dense ones."""

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.config import ModelConfig
from lora_jax.models.sources import WeightRule, weight
from lora_jax.models.weight_names import (
    FILE_LAYER,
    LAYER,
    expert_weights,
    frame_weights,
    mlp_weights,
)
from lora_jax.nn import adapter_sites
from lora_jax.nn.attention import Attention
from lora_jax.nn.decoder import AbstractCausalLM, DecoderLayer
from lora_jax.nn.layers import Mlp, RMSNorm
from lora_jax.nn.moe import MoeBlock


class Qwen3Moe(AbstractCausalLM):
    """Grouped-query attention with head norms, and a mixture of experts or a dense MLP."""

    @staticmethod
    def make_layer(
        config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> DecoderLayer:
        hidden, eps, moe = config.hidden_size, config.norm_eps, config.experts
        sparse = layer in moe.layers
        width = config.intermediate_size
        return DecoderLayer(
            RMSNorm(hidden, eps, dtype=dtype),
            Attention(config, layer, dtype=dtype, rngs=rngs),
            RMSNorm(hidden, eps, dtype=dtype),
            MoeBlock(hidden, moe, layer, dtype=dtype, rngs=rngs)
            if sparse
            else Mlp(hidden, width, layer=layer, dtype=dtype, rngs=rngs),
        )

    @staticmethod
    def catalogue(config: ModelConfig) -> LoraCatalogue:
        hidden, moe = config.hidden_size, config.experts
        dense = tuple(n for n in range(config.num_layers) if n not in moe.layers)
        modules = adapter_sites.attention_modules(config) + adapter_sites.head_modules(config)
        modules += adapter_sites.moe_modules(hidden, moe)
        modules += adapter_sites.mlp_modules(hidden, config.intermediate_size, dense)
        rules = (
            *adapter_sites.attention_rules(),
            *adapter_sites.moe_rules("mlp"),
            *adapter_sites.head_rules(),
        )
        if dense:
            rules += adapter_sites.mlp_rules()
        return LoraCatalogue(
            config.model_type, config.num_layers, adapter_sites.by_name(modules), rules
        )

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        experts, names = f"{FILE_LAYER}.mlp.experts", ("gate_proj", "up_proj", "down_proj")
        return (
            *frame_weights(),
            *mlp_weights(),
            weight(f"{LAYER}.mlp.router.weight", f"{FILE_LAYER}.mlp.gate.weight"),
            *expert_weights(config.experts, f"{experts}.{{expert}}", *names, experts),
        )
