"""A model with a tower: its adapters' modules and its weights are those of both parts."""

import pytest
from flax import nnx
from support.cases.tiny_qwen3_vl import ROPE, VISION
from support.drivers.vision_driver import QWEN_TEXT

from lora_jax.config import from_hf
from lora_jax.models import registry
from lora_jax.models.llama import Llama
from lora_jax.models.qwen3_vl import Qwen3VL
from lora_jax.models.vision_model import AbstractVisionModel
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.vision import PREFIX, AbstractTower

RAW = {
    "model_type": "qwen3_vl",
    "text_config": {**QWEN_TEXT, "rms_norm_eps": 1e-6, "rope_parameters": ROPE},
    "vision_config": VISION,
}
CONFIG = from_hf(RAW)


def test_modules_are_those_of_the_language_model_and_of_the_tower():
    text, both = Llama.catalogue(CONFIG), Qwen3VL.catalogue(CONFIG)
    tower = {module.name for module in Qwen3VL.tower_class.modules(CONFIG.tower)}
    assert set(both.modules) == set(text.modules) | tower
    assert not set(text.modules) & tower
    assert all(name.startswith(PREFIX) for name in tower)


def test_parameters_of_the_tower_are_its_own_and_have_a_rule_each():
    _, state = registry.abstract(CONFIG, "bfloat16")
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}
    assert any(path.startswith("tower.") for path in paths)
    rules = [rule.parameter for rule in Qwen3VL.weight_rules(CONFIG)]
    assert len(set(rules)) == len(rules)
    text = {rule.parameter for rule in Llama.weight_rules(CONFIG)}
    tower = {rule.parameter for rule in Qwen3VL.tower_class.weight_rules(CONFIG.tower)}
    assert set(rules) == text | tower
    assert all(rule.startswith("tower.") for rule in tower)


@pytest.mark.parametrize("base", [AbstractTower, AbstractVisionModel])
def test_a_class_without_its_parts_is_not_made(base: type[nnx.Module]):
    with pytest.raises(TypeError, match="abstract"):
        type("Bare", (base,), {})(CONFIG)


def test_every_model_with_a_tower_is_one():
    kinds = [registry.model_class(name) for name in ("qwen3_vl_moe", "qwen2_5_vl", "llava")]
    assert all(issubclass(kind, AbstractVisionModel) for kind in kinds)
    assert all(issubclass(kind.tower_class, AbstractTower) for kind in kinds)  # pyright: ignore
    assert not issubclass(registry.model_class("llama"), AbstractVisionModel)
    assert issubclass(AbstractVisionModel, AbstractCausalLM)
