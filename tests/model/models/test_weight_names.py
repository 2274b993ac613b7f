"""The spellings that models share, and that the rules make every parameter there is."""

import pytest
from flax import nnx

from lora_jax.config import MoeConfig, from_hf
from lora_jax.models import build, model_class
from lora_jax.models.sources import WeightRule
from lora_jax.models.weight_names import expert_weights, frame_weights, mlp_weights

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
    "attention_bias": True,
    "mlp_bias": True,
}


def names(rules: tuple[WeightRule, ...], path: str) -> list[list[str]]:
    """Return the tensors of each alternative for one parameter."""
    return [list(source.names()) for rule in rules for source in rule.match(path)]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_every_parameter_is_made_by_one_rule(model_type):
    config = from_hf({"model_type": model_type, **SIZES})
    rules = model_class(model_type).weight_rules(config)
    state = nnx.split(nnx.eval_shape(lambda: build(config)), graph=False)[1]
    for path, _ in nnx.to_flat_state(state):
        dotted = ".".join(map(str, path))
        assert sum(bool(rule.match(dotted)) for rule in rules) == 1, dotted


def test_frame():
    rules = frame_weights()
    assert names(rules, "layers.3.attn.k_norm.weight") == [
        ["model.layers.3.self_attn.k_norm.weight"]
    ]
    assert names(rules, "layers.3.attn.v_proj.bias") == [["model.layers.3.self_attn.v_proj.bias"]]
    assert names(rules, "lm_head.weight") == [["lm_head.weight"]]
    assert names(rules, "layers.3.mlp.up_proj.weight") == []


def test_mlp_is_not_mistaken_for_experts():
    rules = mlp_weights()
    assert names(rules, "layers.1.mlp.up_proj.bias") == [["model.layers.1.mlp.up_proj.bias"]]
    assert names(rules, "layers.1.mlp.experts.up_proj") == []


def test_experts_in_two_spellings():
    moe = MoeConfig(2, 1, 24, layers=(0,))
    rules = expert_weights(moe, "h.{layer}.e.{expert}", "w1", "w3", "w2", "f.{layer}")
    assert names(rules, "layers.0.mlp.experts.up_proj") == [
        ["h.0.e.0.w3.weight", "h.0.e.1.w3.weight"],
        ["f.0.gate_up_proj"],
    ]
    assert names(rules, "layers.0.mlp.experts.down_proj")[1] == ["f.0.down_proj"]
