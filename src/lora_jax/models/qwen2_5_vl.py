"""Qwen2.5-VL: Qwen2 with M-RoPE in blocks, beside a tower with windows."""

from lora_jax.models.llama import Llama
from lora_jax.models.qwen2_5_tower import Qwen25Tower
from lora_jax.models.vision_model import AbstractVisionModel


class Qwen25VL(AbstractVisionModel, Llama):
    """Qwen2 with the tower of Qwen2.5-VL."""

    tower_class = Qwen25Tower
