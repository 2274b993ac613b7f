"""Paths of adapters on CLIP and the projector; the numbers are tested with LLaVA."""

import pytest

from lora_jax.adapters.formats.peft_names import find_target
from lora_jax.config import from_hf
from lora_jax.models.llava import Llava

# As the hub's file of LLaVA-1.5-7B has it: the rest are defaults of transformers' classes.
RAW = {
    "model_type": "llava",
    "image_token_index": 32000,
    "text_config": {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
}
CONFIG = from_hf(RAW)
CATALOGUE = Llava.catalogue(CONFIG)


def test_the_hub_s_sparse_config_is_read():
    assert (CONFIG.num_layers, CONFIG.hidden_size, CONFIG.vocab_size) == (32, 4096, 32064)
    assert (CONFIG.tower.num_layers, CONFIG.tower.num_positions) == (23, 577)
    assert CONFIG.tower.image_token_id == 32000


@pytest.mark.parametrize(
    "at", ["model.vision_tower", "vision_tower.vision_model", "model.vision_tower.vision_model"]
)
def test_every_spelling_of_the_tower_leads_to_its_module(at: str):
    for name in ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1"):
        target = find_target(f"{at}.encoder.layers.22.{name}", CATALOGUE)
        assert target is not None
        assert (target.modules[0].name, target.layer) == (f"visual.{name}", 22)
    with pytest.raises(ValueError, match="tower's embeddings"):
        find_target(f"{at}.embeddings.patch_embedding", CATALOGUE)
    with pytest.raises(ValueError, match="in layer 23"):
        find_target(f"{at}.encoder.layers.23.mlp.fc1", CATALOGUE)


@pytest.mark.parametrize("at", ["model.multi_modal_projector", "multi_modal_projector"])
def test_the_projector_is_found(at: str):
    target = find_target(f"{at}.linear_2", CATALOGUE)
    assert target is not None
    assert target.modules[0].name == "visual.projector.linear_2"
