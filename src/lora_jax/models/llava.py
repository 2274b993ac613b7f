"""LLaVA-1.5: Llama beside CLIP and a projector; every image is 576 rows."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.config import ModelConfig
from lora_jax.models.clip_tower import ClipTower
from lora_jax.models.llama import Llama
from lora_jax.models.sources import WeightRule
from lora_jax.models.vision_names import join_catalogues, respelled_weights


class Llava(Llama):
    """The language model, and the tower as its attribute."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        vocab_multiple: int = 1,
    ):
        rngs = rngs or nnx.Rngs(0)
        super().__init__(config, dtype=dtype, rngs=rngs, vocab_multiple=vocab_multiple)
        self.tower = ClipTower(config.tower, dtype=jnp.dtype(dtype), rngs=rngs)

    @staticmethod
    def catalogue(config: ModelConfig) -> LoraCatalogue:
        modules, rules = ClipTower.modules(config.tower), ClipTower.rules(config.tower)
        return join_catalogues(Llama.catalogue(config), modules, rules, config.model_type)

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        text = respelled_weights(Llama.weight_rules(config))
        return (*text, *ClipTower.weight_rules(config.tower))

    @staticmethod
    def ignored_weights(config: ModelConfig) -> tuple[str, ...]:
        return ClipTower.ignored(config.tower)
