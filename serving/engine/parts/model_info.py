"""The base model as it is served: limits for the checks of requests, and its description."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from lora_jax.adapters.catalogue import UNQUANTISED, LoraCatalogue
from lora_jax.config import ModelConfig
from lora_jax.models.weight_sizes import WeightSizes
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.ops.keep_likely import check_vocab
from serving.api.config import EngineConfig
from serving.api.generation_config import GenerationConfig
from serving.engine.memory.sizing import CacheSize
from serving.engine.metrics.quantised_line import quantised_line
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
    quantization: Mapping[str, Any] | None  # format, and how much of the weights it is
    sampling_defaults: Mapping[str, Any]  # of Sampling's fields, where a request sets none
    most_tokens: int | None = None  # max_tokens of a request, beside the context's bound


def model_info(
    config: EngineConfig,
    weights: WeightSizes,
    model_config: ModelConfig,
    size: CacheSize,
    dtype: jnp.dtype,
    tokenizer: Tokenizer,
    generation: GenerationConfig,
) -> ModelInfo:
    """Return what to say of the base.

    ValueError for a generation config whose tokens the model does not have, and for a vocabulary
    that the sampler does not take.
    """
    check_vocab(model_config.vocab_size)
    generation.check_vocab(model_config.vocab_size)
    ends = {*model_config.eos_token_ids, *tokenizer.eos_token_ids, *generation.eos_token_ids}
    if generation.sampling:
        defaults = ", ".join(f"{name} {value}" for name, value in generation.sampling.items())
        logger.info("Sampling defaults: %s (--generation-config).", defaults)
    return ModelInfo(
        name=config.model_name,
        model_type=model_config.model_type,
        vocab_size=model_config.vocab_size,
        max_model_len=size.max_model_len,
        num_layers=model_config.num_layers,
        num_parameters=weights.parameters,
        weight_bytes=weights.num_bytes,
        dtype=dtype.name,
        kv_pages=size.num_pages,
        page_size=size.page_size,
        end_token_ids=tuple(sorted(ends)),
        quantization=quantization_of(model_config, weights),
        sampling_defaults=generation.sampling,
        most_tokens=generation.most_tokens,
    )


def catalogue_of(model: AbstractCausalLM, config: ModelConfig) -> LoraCatalogue:
    """Return what adapters may change, with the format of the base's weights beside it."""
    stored = config.quantization
    quantization = UNQUANTISED if stored is None else stored.format
    return dataclasses.replace(model.catalogue(config), quantization=quantization)


def quantization_of(config: ModelConfig, weights: WeightSizes) -> dict[str, Any] | None:
    """Return what the base's card says of quantised weights; None where there are none."""
    if config.quantization is None or not weights.quantised_parameters:
        return None
    return {
        "format": config.quantization.format,
        "method": config.quantization.method,
        "parameters": weights.quantised_parameters,
        "bits_per_parameter": round(8 * weights.quantised_bytes / weights.quantised_parameters, 2),
        "other_parameters": weights.parameters - weights.quantised_parameters,
    }


def log_quantised(config: ModelConfig, weights: WeightSizes) -> None:
    """Log how many weights are quantised; a checkpoint may hold fewer than its config suggests."""
    summary = quantization_of(config, weights)
    if summary is not None:
        logger.info("%s", quantised_line(summary))
    elif config.quantization is not None:
        logger.info("Quantised weights: none, in a model whose files have them.")
    if config.quantization is not None and config.quantization.kv_scales:
        logger.info(
            "Scales of KV pages in the model's files are not used: --kv-cache-dtype fp8 keeps "
            "pages in 8 bits with scales of its own."
        )
