"""LLaVA-1.5: Llama beside CLIP and a projector; every image is 576 rows."""

from lora_jax.models.clip_tower import ClipTower
from lora_jax.models.llama import Llama
from lora_jax.models.vision_model import AbstractVisionModel


class Llava(AbstractVisionModel, Llama):
    """Llama with CLIP."""

    tower_class = ClipTower
