"""Paths of adapters on Qwen3-VL's tower; its numbers are tested with the models."""

import pytest
from support.cases.tiny_qwen3_vl import ROPE, VISION
from support.drivers.vision_driver import QWEN_TEXT

from lora_jax.adapters.formats.peft_names import find_target
from lora_jax.config import from_hf
from lora_jax.models.qwen3_vl import Qwen3VL

RAW = {
    "model_type": "qwen3_vl",
    "text_config": {**QWEN_TEXT, "rms_norm_eps": 1e-6, "rope_parameters": ROPE},
    "vision_config": VISION,
}
CATALOGUE = Qwen3VL.catalogue(from_hf(RAW))


@pytest.mark.parametrize("at", ["model.visual", "visual"])
@pytest.mark.parametrize(
    ("path", "module", "layer"),
    [
        ("blocks.3.attn.qkv", "visual.attn.qkv", 3),
        ("blocks.0.mlp.linear_fc2", "visual.mlp.linear_fc2", 0),
        ("merger.linear_fc1", "visual.merger.linear_fc1", 0),
        ("deepstack_merger_list.1.linear_fc2", "visual.deepstack_merger_list.linear_fc2", 1),
    ],
)
def test_every_spelling_leads_to_its_module(at: str, path: str, module: str, layer: int):
    target = find_target(f"{at}.{path}", CATALOGUE)
    assert target is not None
    assert (target.modules[0].name, target.layer) == (module, layer)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("patch_embed.proj", "patches' embedding"),
        ("pos_embed", "learned positions"),
        ("blocks.4.attn.qkv", "in layer 4"),
        ("deepstack_merger_list.2.linear_fc1", "in layer 2"),
    ],
)
def test_what_no_adapter_may_change_is_refused_by_name(path: str, why: str):
    with pytest.raises(ValueError, match=why):
        find_target(f"model.visual.{path}", CATALOGUE)


def test_paths_of_other_towers_are_unknown():
    for path in ("visual.blocks.0.attn.q", "vision_tower.encoder.layers.0.mlp.fc1", "blocks.0"):
        assert find_target(path, CATALOGUE) is None
