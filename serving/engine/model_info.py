"""The base model as it is served: what requests are checked against, and what is said of it."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from lora_jax.config import ModelConfig
from serving.api.config import EngineConfig
from serving.api.generation_config import GenerationConfig
from serving.engine.sizing import CacheSize
from serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """The base model as it is served."""

    name: str
    model_type: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    num_parameters: int
    weight_bytes: int
    dtype: str
    kv_pages: int
    page_size: int
    end_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]  # of Sampling's fields, where a request sets none


def model_info(
    config: EngineConfig,
    weights: list[tuple[int, int]],
    model_config: ModelConfig,
    size: CacheSize,
    dtype: jnp.dtype,
    tokenizer: Tokenizer,
    generation: GenerationConfig,
) -> ModelInfo:
    """Return what to say of the base; `weights` are the sizes and bytes of all its arrays.

    ValueError for a generation config whose tokens the model does not have.
    """
    generation.check_vocab(model_config.vocab_size)
    ends = {*model_config.eos_token_ids, *tokenizer.eos_token_ids, *generation.eos_token_ids}
    if generation.sampling:
        said = ", ".join(f"{name} {value}" for name, value in generation.sampling.items())
        logger.info("Sampling defaults: %s (--generation-config).", said)
    return ModelInfo(
        name=config.model_name,
        model_type=model_config.model_type,
        vocab_size=model_config.vocab_size,
        max_model_len=size.max_model_len,
        num_layers=model_config.num_layers,
        num_parameters=sum(size for size, _ in weights),
        weight_bytes=sum(num_bytes for _, num_bytes in weights),
        dtype=dtype.name,
        kv_pages=size.num_pages,
        page_size=size.page_size,
        end_token_ids=tuple(sorted(ends)),
        sampling_defaults=generation.sampling,
    )
