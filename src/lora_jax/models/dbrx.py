"""DBRX: layer norms without bias, fused and clipped qkv, sixteen fine-grained experts, four used.

Files keep q, k, v in one Wqkv and the experts as stacks [experts * width, hidden], of which w2 is
used as it lies (x @ w2). Adapters on Wqkv change its three parts, before the clip.

PEFT cannot train the stacks, so adapters on experts follow a naming of our own, the one of other
models with a matrix per expert:
`transformer.blocks.{layer}.ffn.experts.{expert}.{w1,v1,w2}.lora_{A,B}.weight`, where w1 is the
gate, v1 the up projection (A [rank, hidden], B [width, rank]) and w2 the down projection
(A [rank, width], B [hidden, rank]); y += scaling * (x A^T) B^T for each of them.
"""

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.config import ModelConfig
from lora_jax.models.sources import Slice, Tensor, Transpose, Unflatten, WeightRule, weight
from lora_jax.models.weight_names import LAYER
from lora_jax.nn import adapter_sites
from lora_jax.nn.attention import Attention
from lora_jax.nn.decoder import AbstractCausalLM, DecoderLayer
from lora_jax.nn.layers import LayerNorm
from lora_jax.nn.moe import MoeBlock


class Dbrx(AbstractCausalLM):
    """Grouped-query attention with a clip, and experts, in every layer."""

    @staticmethod
    def make_layer(
        config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> DecoderLayer:
        return DecoderLayer(
            Dbrx.make_norm(config, dtype),
            Attention(config, layer, dtype=dtype, rngs=rngs),
            Dbrx.make_norm(config, dtype),
            MoeBlock(config.hidden_size, config.experts, layer, dtype=dtype, rngs=rngs),
        )

    @staticmethod
    def make_norm(config: ModelConfig, dtype: jnp.dtype) -> LayerNorm:
        return LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype)

    @staticmethod
    def catalogue(config: ModelConfig) -> LoraCatalogue:
        at = "transformer.blocks.{layer}"
        modules = adapter_sites.attention_modules(config) + adapter_sites.head_modules(config)
        modules += adapter_sites.moe_modules(config.hidden_size, config.experts)
        rules = (
            adapter_sites.rule(f"{at}.norm_attn_norm.attn.Wqkv", "q_proj", "k_proj", "v_proj"),
            adapter_sites.rule(f"{at}.norm_attn_norm.attn.out_proj", "o_proj"),
            adapter_sites.rule(f"{at}.ffn.router.layer", "router"),
            adapter_sites.rule(f"{at}.ffn.experts.{{expert}}.w1", "experts.gate_proj"),
            adapter_sites.rule(f"{at}.ffn.experts.{{expert}}.v1", "experts.up_proj"),
            adapter_sites.rule(f"{at}.ffn.experts.{{expert}}.w2", "experts.down_proj"),
            *adapter_sites.head_rules("transformer.wte"),
        )
        return LoraCatalogue(
            config.model_type, config.num_layers, adapter_sites.by_name(modules), rules
        )

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        file = "transformer.blocks.{layer}"
        attention = f"{file}.norm_attn_norm"
        q_end = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        ends = {"q": (0, q_end), "k": (q_end, q_end + kv_size)}
        ends["v"] = (q_end + kv_size, q_end + 2 * kv_size)
        fused = Tensor(f"{attention}.attn.Wqkv.weight")
        stacks = f"{file}.ffn.experts.mlp"
        count = config.experts.num_experts
        gate, up, down = (Unflatten(Tensor(f"{stacks}.{n}"), count) for n in ("w1", "v1", "w2"))
        return (
            weight("embed.weight", "transformer.wte.weight"),
            weight("norm.weight", "transformer.norm_f.weight"),
            weight("lm_head.weight", "lm_head.weight"),
            weight(f"{LAYER}.input_norm.weight", f"{attention}.norm_1.weight"),
            weight(f"{LAYER}.post_norm.weight", f"{attention}.norm_2.weight"),
            *(
                weight(f"{LAYER}.attn.{name}_proj.weight", Slice(fused, 0, *rows))
                for name, rows in ends.items()
            ),
            weight(f"{LAYER}.attn.o_proj.weight", f"{attention}.attn.out_proj.weight"),
            weight(f"{LAYER}.mlp.router.weight", f"{file}.ffn.router.layer.weight"),
            weight(f"{LAYER}.mlp.experts.gate_proj", gate),
            weight(f"{LAYER}.mlp.experts.up_proj", up),
            weight(f"{LAYER}.mlp.experts.down_proj", Transpose(down)),
        )
