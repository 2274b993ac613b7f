"""The catalogue's building blocks: spellings, refusals and sizes."""

import re

import pytest

from lora_jax.config import MoeConfig
from lora_jax.nn import adapter_sites


def groups(rule, path: str) -> dict[str, str] | None:
    found = rule.pattern.fullmatch(path)
    return found and found.groupdict()


def test_rule_has_numbers_and_literal_dots():
    rule = adapter_sites.rule(
        "model.layers.{layer}.mlp.experts.{expert}.(?:gate_proj|w1)", "experts.gate_proj"
    )
    path = "model.layers.12.mlp.experts.3.w1"
    assert groups(rule, path) == {"layer": "12", "expert": "3"}
    assert rule.module == "experts.gate_proj"
    for other in (path.replace(".", "x"), path + ".weight", path.replace("w1", "w2")):
        assert groups(rule, other) is None


def test_fused_rule_names_its_parts_in_order():
    rule = adapter_sites.rule("h.{layer}.Wqkv", "q_proj", "k_proj", "v_proj")
    assert rule.module is None
    assert rule.split == ("q_proj", "k_proj", "v_proj")


def test_embedding_is_refused_with_a_reason():
    head, embedding = adapter_sites.head_rules()
    assert head.module == "lm_head"
    assert embedding.pattern.fullmatch("model.embed_tokens")
    assert embedding.module is None
    assert "embedding" in embedding.why


@pytest.mark.parametrize("shared", [0, 40])
def test_modules_of_a_mixture(shared):
    moe = MoeConfig(8, 2, 24, layers=(1, 2), shared_size=shared)
    modules = adapter_sites.by_name(adapter_sites.moe_modules(32, moe))
    assert (modules["router"].d_in, modules["router"].d_out) == (32, 8)
    down = modules["experts.down_proj"]
    assert (down.d_in, down.d_out, down.num_experts, down.layers) == (24, 32, 8, (1, 2))
    assert ("shared_experts.up_proj" in modules) == bool(shared)
    if shared:
        assert modules["shared_experts.up_proj"].d_out == 40


def test_no_modules_without_layers():
    assert adapter_sites.moe_modules(32, MoeConfig(8, 2, 24, layers=())) == []
    assert adapter_sites.mlp_modules(32, 24, ()) == []


def test_mixture_rules_cover_both_block_names():
    rules = adapter_sites.moe_rules("(?:block_sparse_moe|mlp)")
    paths = {
        "model.layers.0.block_sparse_moe.gate": "router",
        "model.layers.0.mlp.gate": "router",
        "model.layers.0.block_sparse_moe.experts.7.w3": "experts.up_proj",
        "model.layers.0.mlp.experts.7.down_proj": "experts.down_proj",
    }
    for path, module in paths.items():
        assert [r.module for r in rules if re.fullmatch(r.pattern, path)] == [module]
