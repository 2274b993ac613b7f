"""A tower's config and its processor's settings, as small as tests of the host want them."""

from lora_jax.config import VisionConfig
from lora_jax.vision.processor import ProcessorSettings

TOWER = VisionConfig(
    family="qwen3_vl",
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    intermediate_size=8,
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    out_size=8,
    norm_eps=1e-6,
    image_token_id=9,
)
HALF = (0.5, 0.5, 0.5)
SETTINGS = ProcessorSettings("qwen3_vl", 4, 2, 2, 64, 4096, 0, HALF, HALF)
