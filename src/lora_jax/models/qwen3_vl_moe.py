"""Qwen3-VL-MoE: Qwen3-MoE with interleaved M-RoPE, beside the tower of Qwen3-VL."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.config import ModelConfig
from lora_jax.models.qwen3_moe import Qwen3Moe
from lora_jax.models.qwen3_tower import Qwen3Tower
from lora_jax.models.sources import Oriented, Slice, Tensor, WeightRule, weight
from lora_jax.models.vision_names import join_catalogues, respelled_weights
from lora_jax.models.weight_names import FILE_LAYER, LAYER, frame_weights, mlp_weights


class Qwen3VLMoe(Qwen3Moe):
    """The language model, and the tower as its attribute."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        vocab_multiple: int = 1,
    ):
        rngs = rngs or nnx.Rngs(0)
        super().__init__(config, dtype=dtype, rngs=rngs, vocab_multiple=vocab_multiple)
        self.tower = Qwen3Tower(config.tower, dtype=jnp.dtype(dtype), rngs=rngs)

    @staticmethod
    def catalogue(config: ModelConfig) -> LoraCatalogue:
        modules, rules = Qwen3Tower.modules(config.tower), Qwen3Tower.rules(config.tower)
        return join_catalogues(Qwen3Moe.catalogue(config), modules, rules, config.model_type)

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        router = weight(f"{LAYER}.mlp.router.weight", f"{FILE_LAYER}.mlp.gate.weight")
        text = (*frame_weights(), *mlp_weights(), router, *_experts(config))
        return (*respelled_weights(text), *Qwen3Tower.weight_rules(config.tower))


def _experts(config: ModelConfig) -> tuple[WeightRule, ...]:
    """Return the rules of experts, fused in one tensor a layer.

    The hub has them as [experts, d_in, d_out], transformers 5 writes [experts, d_out, d_in].
    """
    hidden, width = config.hidden_size, config.experts.intermediate_size
    here, file = f"{LAYER}.mlp.experts", f"{FILE_LAYER}.mlp.experts"
    gate_up, down = Tensor(f"{file}.gate_up_proj"), Tensor(f"{file}.down_proj")
    wide, narrow = (2 * width, hidden), (hidden, width)
    both = Oriented(gate_up, wide, down, narrow)
    return (
        weight(f"{here}.gate_proj", Slice(both, 1, 0, width)),
        weight(f"{here}.up_proj", Slice(both, 1, width, 2 * width)),
        weight(f"{here}.down_proj", Oriented(down, narrow, gate_up, wide)),
    )
