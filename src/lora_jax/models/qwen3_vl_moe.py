"""Qwen3-VL-MoE: Qwen3-MoE with interleaved M-RoPE, beside the tower of Qwen3-VL."""

from lora_jax.config import ModelConfig
from lora_jax.models.qwen3_moe import Qwen3Moe
from lora_jax.models.qwen3_tower import Qwen3Tower
from lora_jax.models.sources import Oriented, Slice, Stack, Tensor, WeightRule, weight
from lora_jax.models.vision_model import AbstractVisionModel
from lora_jax.models.weight_names import FILE_LAYER, LAYER, frame_weights, mlp_weights


class _FusedQwen3Moe(Qwen3Moe):
    """Qwen3-MoE from checkpoints that may have the experts of a layer in one tensor."""

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        router = weight(f"{LAYER}.mlp.router.weight", f"{FILE_LAYER}.mlp.gate.weight")
        return (*frame_weights(), *mlp_weights(), router, *_experts(config))


class Qwen3VLMoe(AbstractVisionModel, _FusedQwen3Moe):
    """Qwen3-MoE with the tower of Qwen3-VL."""

    tower_class = Qwen3Tower


def _experts(config: ModelConfig) -> tuple[WeightRule, ...]:
    """Return the rules of experts, fused in one tensor a layer or with one tensor each.

    The hub has fused ones as [experts, d_in, d_out], transformers 5 writes [experts, d_out, d_in].
    Tools that quantise linear maps write each expert's.
    """
    hidden, width = config.hidden_size, config.experts.intermediate_size
    ours, file = f"{LAYER}.mlp.experts", f"{FILE_LAYER}.mlp.experts"
    gate_up, down = Tensor(f"{file}.gate_up_proj"), Tensor(f"{file}.down_proj")
    wide, narrow = (2 * width, hidden), (hidden, width)
    both = Oriented(gate_up, wide, down, narrow)
    fused = {
        "gate_proj": Slice(both, 1, 0, width),
        "up_proj": Slice(both, 1, width, 2 * width),
        "down_proj": Oriented(down, narrow, gate_up, wide),
    }
    count = config.experts.num_experts
    return tuple(
        weight(f"{ours}.{name}", source, Stack(f"{file}.{{expert}}.{name}.weight", count))
        for name, source in fused.items()
    )
