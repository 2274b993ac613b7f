"""Qwen3-VL: Qwen3 with interleaved M-RoPE, beside a tower with deepstack."""

from lora_jax.models.llama import Llama
from lora_jax.models.qwen3_tower import Qwen3Tower
from lora_jax.models.vision_model import AbstractVisionModel


class Qwen3VL(AbstractVisionModel, Llama):
    """Qwen3 with the tower of Qwen3-VL."""

    tower_class = Qwen3Tower
