"""Base class of a language model with a tower: its weights and its adapters' modules are both's."""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.config import ModelConfig
from lora_jax.models.sources import WeightRule
from lora_jax.models.vision_names import join_catalogues, respelled_weights
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.vision import AbstractTower


class AbstractVisionModel(AbstractCausalLM):
    """A language model, the base class after this one, with a tower as its attribute.

    A model is `class Model(AbstractVisionModel, Text)` with its `tower_class`.
    """

    tower_class: ClassVar[type[AbstractTower]]

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        vocab_multiple: int = 1,
    ):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        super().__init__(config, dtype=dtype, rngs=rngs, vocab_multiple=vocab_multiple)
        self.tower = self.tower_class(config.tower, dtype=jnp.dtype(dtype), rngs=rngs)

    @classmethod
    def catalogue(cls, config: ModelConfig) -> LoraCatalogue:
        tower = cls.tower_class
        modules, rules = tower.modules(config.tower), tower.rules(config.tower)
        return join_catalogues(super().catalogue(config), modules, rules, config.model_type)

    @classmethod
    def weight_rules(cls, config: ModelConfig) -> tuple[WeightRule, ...]:
        text = respelled_weights(super().weight_rules(config))
        return (*text, *cls.tower_class.weight_rules(config.tower))

    @classmethod
    def ignored_weights(cls, config: ModelConfig) -> tuple[str, ...]:
        return (*super().ignored_weights(config), *cls.tower_class.ignored_weights(config.tower))
