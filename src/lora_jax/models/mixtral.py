"""Mixtral: Llama's attention, and experts instead of the MLP in every layer."""

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.config import ModelConfig
from lora_jax.models.sources import WeightRule, weight
from lora_jax.models.weight_names import FILE_LAYER, LAYER, expert_weights, frame_weights
from lora_jax.nn import adapter_sites
from lora_jax.nn.attention import Attention
from lora_jax.nn.decoder import AbstractCausalLM, DecoderLayer
from lora_jax.nn.layers import RMSNorm
from lora_jax.nn.moe import MoeBlock


class Mixtral(AbstractCausalLM):
    """Grouped-query attention and a mixture of experts in every layer."""

    @staticmethod
    def make_layer(
        config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> DecoderLayer:
        hidden, eps = config.hidden_size, config.norm_eps
        return DecoderLayer(
            RMSNorm(hidden, eps, dtype=dtype),
            Attention(config, layer, dtype=dtype, rngs=rngs),
            RMSNorm(hidden, eps, dtype=dtype),
            MoeBlock(hidden, config.experts, layer, dtype=dtype, rngs=rngs),
        )

    @staticmethod
    def catalogue(config: ModelConfig) -> LoraCatalogue:
        modules = adapter_sites.attention_modules(config) + adapter_sites.head_modules(config)
        modules += adapter_sites.moe_modules(config.hidden_size, config.experts)
        experts = adapter_sites.moe_rules("(?:block_sparse_moe|mlp)")
        rules = (*adapter_sites.attention_rules(), *experts, *adapter_sites.head_rules())
        return LoraCatalogue(
            config.model_type, config.num_layers, adapter_sites.by_name(modules), rules
        )

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        old, new = f"{FILE_LAYER}.block_sparse_moe", f"{FILE_LAYER}.mlp"
        experts = f"{old}.experts.{{expert}}"
        return (
            *frame_weights(),
            weight(f"{LAYER}.mlp.router.weight", f"{old}.gate.weight", f"{new}.gate.weight"),
            *expert_weights(config.experts, experts, "w1", "w3", "w2", f"{new}.experts"),
        )
