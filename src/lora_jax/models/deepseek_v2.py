"""DeepSeek-V2 and V2-Lite: latent attention, dense first layers, then experts with a shared MLP.

Files keep kv_b_proj as one matrix, head by head [nope | v]; here its two halves are stacked per
head as the absorbed attention uses them (see lora_jax.nn.mla). Adapters name kv_b_proj as files do.
"""

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import EXPERTS, WHOLE, LoraCatalogue, LoraModule
from lora_jax.config import MlaConfig, ModelConfig
from lora_jax.kv_cache import KVShape
from lora_jax.models.sources import Slice, Tensor, Transpose, Unflatten, WeightRule, weight
from lora_jax.models.weight_names import (
    FILE_LAYER,
    LAYER,
    expert_weights,
    frame_weights,
    mlp_weights,
)
from lora_jax.nn import adapter_sites
from lora_jax.nn.decoder import AbstractCausalLM, DecoderLayer, MlpLike
from lora_jax.nn.layers import Mlp, RMSNorm
from lora_jax.nn.mla import LatentAttention, latent_kv_shape
from lora_jax.nn.moe import MoeBlock


class DeepseekV2(AbstractCausalLM):
    """Latent attention in every layer; a dense MLP in the first ones, experts in the others."""

    @staticmethod
    def make_layer(
        config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> DecoderLayer:
        hidden, eps = config.hidden_size, config.norm_eps
        return DecoderLayer(
            RMSNorm(hidden, eps, dtype=dtype),
            LatentAttention(config, layer, dtype=dtype, rngs=rngs),
            RMSNorm(hidden, eps, dtype=dtype),
            _make_mlp(config, layer, dtype, rngs),
        )

    @staticmethod
    def kv_shape(config: ModelConfig) -> KVShape:
        return latent_kv_shape(config)

    @staticmethod
    def catalogue(config: ModelConfig) -> LoraCatalogue:
        mla, hidden, moe = config.latent, config.hidden_size, config.moe
        sparse = moe.layers if moe else ()
        dense = tuple(n for n in range(config.num_layers) if n not in sparse)
        modules = _attention_modules(config, mla) + adapter_sites.head_modules(config)
        modules += adapter_sites.mlp_modules(hidden, config.intermediate_size, dense)
        modules += adapter_sites.moe_modules(hidden, moe) if moe else []
        names = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
        by_name = adapter_sites.by_name(modules)
        rules = (
            *adapter_sites.attention_rules(name for name in names if name in by_name),
            adapter_sites.rule(
                "model.layers.{layer}.self_attn.kv_b_proj", "kv_b_proj.k", "kv_b_proj.v"
            ),
            *(adapter_sites.mlp_rules() if dense else ()),
            *(adapter_sites.mlp_rules("shared_experts.") if moe and moe.shared_size else ()),
            *(adapter_sites.moe_rules("mlp") if moe else ()),
            *adapter_sites.head_rules(),
        )
        return LoraCatalogue(
            config.model_type,
            config.num_layers,
            by_name,
            rules,
            kv_b_heads=(config.num_heads, mla.nope_dim, mla.v_dim),
        )

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        experts, names = f"{FILE_LAYER}.mlp.experts", ("gate_proj", "up_proj", "down_proj")
        shared = "mlp.shared_experts.{map}.{kind}"
        return (
            *_kv_b_weights(config),
            *frame_weights(),
            *mlp_weights(),
            weight(f"{LAYER}.{shared}", f"{FILE_LAYER}.{shared}"),
            weight(f"{LAYER}.mlp.router.weight", f"{FILE_LAYER}.mlp.gate.weight"),
            *(
                expert_weights(config.moe, f"{experts}.{{expert}}", *names, experts)
                if config.moe
                else ()
            ),
        )


def _make_mlp(config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> MlpLike:
    hidden = config.hidden_size
    if config.moe is not None and layer in config.moe.layers:
        return MoeBlock(hidden, config.moe, layer, dtype=dtype, rngs=rngs)
    width, bias = config.intermediate_size, config.mlp_bias
    return Mlp(hidden, width, layer=layer, bias=bias, dtype=dtype, rngs=rngs)


def _attention_modules(config: ModelConfig, mla: MlaConfig) -> list[LoraModule]:
    """Return the linear maps of latent attention; of kv_b_proj the two absorbed ones."""
    hidden, heads, latent = config.hidden_size, config.num_heads, mla.kv_lora_rank
    layers, q_size = tuple(range(config.num_layers)), config.num_heads * config.head_dim
    if mla.q_lora_rank is None:
        query = [LoraModule("q_proj", hidden, q_size, layers)]
    else:
        query = [
            LoraModule("q_a_proj", hidden, mla.q_lora_rank, layers, split=WHOLE),
            LoraModule("q_b_proj", mla.q_lora_rank, q_size, layers),
        ]
    return [
        *query,
        LoraModule("kv_a_proj_with_mqa", hidden, latent + mla.rope_dim, layers, split=WHOLE),
        LoraModule("kv_b_proj.k", mla.nope_dim, latent, layers, heads, EXPERTS),
        LoraModule("kv_b_proj.v", latent, mla.v_dim, layers, heads, EXPERTS),
        LoraModule("o_proj", heads * mla.v_dim, hidden, layers),
    ]


def _kv_b_weights(config: ModelConfig) -> tuple[WeightRule, ...]:
    """Return the rules of the two halves of kv_b_proj, whose rows of a head are [nope | v]."""
    mla = config.latent
    stored = Tensor(f"{FILE_LAYER}.self_attn.kv_b_proj.weight")
    by_head = Unflatten(stored, config.num_heads)
    keys = Slice(by_head, 1, 0, mla.nope_dim)
    values = Slice(by_head, 1, mla.nope_dim, mla.nope_dim + mla.v_dim)
    return (
        weight(f"{LAYER}.attn.absorb_k.weight", Transpose(keys)),
        weight(f"{LAYER}.attn.absorb_v.weight", values),
    )
