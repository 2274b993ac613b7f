"""Base models, one file each, and the way from a checkpoint folder to a model."""

from lora_jax.models.dummy import make_dummy
from lora_jax.models.loader import load
from lora_jax.models.registry import build, model_class

__all__ = ["build", "load", "make_dummy", "model_class"]
