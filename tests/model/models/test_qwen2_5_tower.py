"""Paths of adapters on Qwen2.5-VL's tower; its numbers are tested with the model."""

import pytest
from support.drivers.vision_driver import QWEN_TEXT

from lora_jax.adapters.formats.peft_names import find_target
from lora_jax.config import from_hf
from lora_jax.models.qwen2_5_vl import Qwen25VL

VISION = {"depth": 2, "hidden_size": 24, "num_heads": 2, "intermediate_size": 20}
RAW = {
    "model_type": "qwen2_5_vl",
    **{name: value for name, value in QWEN_TEXT.items() if name != "head_dim"},
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "vision_config": VISION | {"out_hidden_size": 32, "fullatt_block_indexes": [1]},
}
CATALOGUE = Qwen25VL.catalogue(from_hf(RAW))


@pytest.mark.parametrize("at", ["model.visual", "visual"])
@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("blocks.1.attn.proj", "visual.attn.proj"),
        ("blocks.1.mlp.gate_proj", "visual.mlp.gate_proj"),
        ("merger.mlp.0", "visual.merger.mlp.0"),
        ("merger.mlp.2", "visual.merger.mlp.2"),
    ],
)
def test_every_spelling_leads_to_its_module(at: str, path: str, module: str):
    target = find_target(f"{at}.{path}", CATALOGUE)
    assert target is not None
    assert target.modules[0].name == module


def test_the_patches_and_unknown_paths_are_refused():
    with pytest.raises(ValueError, match="patches' embedding"):
        find_target("visual.patch_embed.proj", CATALOGUE)
    for path in ("visual.merger.mlp.1", "visual.merger.ln_q", "visual.blocks.0.mlp.linear_fc1"):
        assert find_target(path, CATALOGUE) is None
