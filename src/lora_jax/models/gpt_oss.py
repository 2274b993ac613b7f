"""GPT-OSS: attention sinks, alternating sliding windows, biases everywhere, clamped SwiGLU experts.

Files keep an expert's gate and up interleaved along one axis, transposed in bf16 files and as
MXFP4 blocks in the released ones; here they are two matrices. Adapters on the fused parameter
interleave them too (`interleaved_gate_up`).
"""

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.config import ModelConfig, MoeConfig
from lora_jax.models.sources import Mxfp4, Slice, Tensor, Transpose, WeightRule, weight
from lora_jax.models.weight_names import FILE_LAYER, LAYER, frame_weights
from lora_jax.nn import adapter_sites
from lora_jax.nn.attention import Attention
from lora_jax.nn.decoder import AbstractCausalLM, DecoderLayer
from lora_jax.nn.layers import RMSNorm
from lora_jax.nn.moe import MoeBlock


class GptOss(AbstractCausalLM):
    """Grouped-query attention with sinks, and experts, in every layer."""

    @staticmethod
    def make_layer(
        config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> DecoderLayer:
        hidden, eps = config.hidden_size, config.norm_eps
        return DecoderLayer(
            RMSNorm(hidden, eps, dtype=dtype),
            Attention(config, layer, sinks=True, dtype=dtype, rngs=rngs),
            RMSNorm(hidden, eps, dtype=dtype),
            MoeBlock(hidden, config.experts, layer, dtype=dtype, rngs=rngs),
        )

    @staticmethod
    def catalogue(config: ModelConfig) -> LoraCatalogue:
        modules = adapter_sites.attention_modules(config) + adapter_sites.head_modules(config)
        modules += adapter_sites.moe_modules(config.hidden_size, config.experts)
        rules = (
            *adapter_sites.attention_rules(),
            *adapter_sites.moe_rules("mlp", router="router"),
            *adapter_sites.head_rules(),
        )
        return LoraCatalogue(
            config.model_type,
            config.num_layers,
            adapter_sites.by_name(modules),
            rules,
            interleaved_gate_up=True,
        )

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        router = "mlp.router.{kind}"
        return (
            *frame_weights(),
            weight(f"{LAYER}.attn.sinks", f"{FILE_LAYER}.self_attn.sinks"),
            weight(f"{LAYER}.{router}", f"{FILE_LAYER}.{router}"),
            *_expert_weights(config.experts),
        )


def _expert_weights(moe: MoeConfig) -> tuple[WeightRule, ...]:
    """Return the rules of the experts' matrices and biases; gate's rows are even, up's odd."""
    ours, file = f"{LAYER}.mlp.experts", f"{FILE_LAYER}.mlp.experts"
    both, down = f"{file}.gate_up_proj", f"{file}.down_proj"
    end = 2 * moe.intermediate_size
    rules = [
        weight(f"{ours}.down_proj", Transpose(Tensor(down)), Mxfp4(down)),
        weight(f"{ours}.down_bias", f"{down}_bias"),
    ]
    for start, name in enumerate(("gate", "up")):
        stored = Transpose(Tensor(both)), Mxfp4(both)
        matrices = (Slice(source, 1, start, end, step=2) for source in stored)
        rules.append(weight(f"{ours}.{name}_proj", *matrices))
        rules.append(weight(f"{ours}.{name}_bias", Slice(Tensor(f"{both}_bias"), 1, start, end, 2)))
    return tuple(rules)
