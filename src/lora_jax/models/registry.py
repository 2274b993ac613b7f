"""Registry of model classes by model_type; a model's file is imported on first use."""

import functools
import importlib
from typing import Any

import jax.numpy as jnp
from flax import nnx

from lora_jax.config import ModelConfig
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.sharding import Split

_CLASSES = {
    "llama": "llama:Llama",
    "mistral": "llama:Llama",
    "qwen2": "llama:Llama",
    "qwen3": "llama:Llama",
    "mixtral": "mixtral:Mixtral",
    "qwen3_moe": "qwen3_moe:Qwen3Moe",
    "gpt_oss": "gpt_oss:GptOss",
    "deepseek_v2": "deepseek_v2:DeepseekV2",
    "dbrx": "dbrx:Dbrx",
    "qwen3_vl": "qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "qwen3_vl_moe:Qwen3VLMoe",
    "qwen2_5_vl": "qwen2_5_vl:Qwen25VL",
    "llava": "llava:Llava",
}


def model_class(model_type: str) -> type[AbstractCausalLM]:
    """Return the class of a model_type.

    Raises:
        ValueError: the model_type is unknown; the message lists the known ones.
    """
    if model_type not in _CLASSES:
        allowed = ", ".join(sorted(_CLASSES))
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {allowed}.")
    module, name = _CLASSES[model_type].split(":")
    return getattr(importlib.import_module(f"lora_jax.models.{module}"), name)


def abstract(config: ModelConfig, dtype: Any, split: Split | None = None) -> tuple[Any, Any]:
    """Return a model without memory as nnx.split gives it, its vocabulary padded for a split.

    Nobody may change it: the last ones are kept. No device is touched.
    """
    return _abstract(config, jnp.dtype(dtype), 1 if split is None else split.vocab_multiple)


@functools.lru_cache(maxsize=4)
def _abstract(config: ModelConfig, dtype: jnp.dtype, multiple: int) -> tuple[Any, Any]:
    kind = model_class(config.model_type)
    sizes: dict[str, Any] = {"dtype": dtype, "vocab_multiple": multiple}
    model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(), **sizes))
    return nnx.split(model, graph=False)


def stored_shape(param: Any, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of a parameter without the rows that pad the vocabulary."""
    shape = tuple(param.shape)
    axes = param.get_metadata()["logical_axes"]
    return (config.vocab_size, *shape[1:]) if axes[0] == "vocab" else shape


def build(
    config: ModelConfig, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None
) -> AbstractCausalLM:
    """Return a model with random weights."""
    return model_class(config.model_type)(config, dtype=dtype, rngs=rngs)
