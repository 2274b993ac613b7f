"""Weight rules that several models share, in the words of transformers' checkpoints."""

from lora_jax.config import MoeConfig
from lora_jax.models.sources import Slice, Source, Stack, Tensor, WeightRule, weight

LAYER = "layers.{layer}"  # of our parameters
FILE_LAYER = "model.layers.{layer}"  # of the files


def frame_weights() -> tuple[WeightRule, ...]:
    """Return the rules of embedding, head, norms and attention, biases and head norms included."""
    return (
        weight("embed.weight", "model.embed_tokens.weight"),
        weight("norm.weight", "model.norm.weight"),
        weight("lm_head.weight", "lm_head.weight"),
        weight(f"{LAYER}.input_norm.weight", f"{FILE_LAYER}.input_layernorm.weight"),
        weight(f"{LAYER}.post_norm.weight", f"{FILE_LAYER}.post_attention_layernorm.weight"),
        weight(f"{LAYER}.attn.{{map}}.{{kind}}", f"{FILE_LAYER}.self_attn.{{map}}.{{kind}}"),
    )


def mlp_weights() -> tuple[WeightRule, ...]:
    """Return the rules of dense MLPs."""
    ours, file = f"{LAYER}.mlp.{{map}}_proj.{{kind}}", f"{FILE_LAYER}.mlp.{{map}}_proj.{{kind}}"
    return (weight(ours, file),)


def expert_weights(
    moe: MoeConfig, single: str, gate: str, up: str, down: str, fused: str
) -> tuple[WeightRule, ...]:
    """Return the rules of experts, one tensor each or fused.

    `single` is the name of one expert with {expert} in it, below which stand `gate`, `up` and
    `down`; `fused` is the parent of gate_up_proj [experts, 2 width, hidden], gate first, and
    down_proj [experts, hidden, width].
    """
    width, gate_up = moe.intermediate_size, Tensor(f"{fused}.gate_up_proj")

    def each(name: str) -> Source:
        return Stack(f"{single}.{name}.weight", moe.num_experts)

    ours = f"{LAYER}.mlp.experts"
    return (
        weight(f"{ours}.gate_proj", each(gate), Slice(gate_up, 1, 0, width)),
        weight(f"{ours}.up_proj", each(up), Slice(gate_up, 1, width, 2 * width)),
        weight(f"{ours}.down_proj", each(down), Tensor(f"{fused}.down_proj")),
    )
