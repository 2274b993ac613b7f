"""Tiny Qwen3-VL configs for tests against transformers, and the hub's spelling of them."""

from typing import Any

ROPE = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "mrope_section": [2, 2, 2],
    "mrope_interleaved": True,
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [1, 2],
    "initializer_range": 0.3,
}


def old_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config as the hub has it: rope in two keys, the tower's type the outer one."""
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    config["vision_config"]["model_type"] = config["model_type"]
    config["torch_dtype"] = config.pop("dtype")
    return config
