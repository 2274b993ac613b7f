"""The parts of an engine whose model takes images: the encoder on the device, the front before."""

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric

from lora_jax.config import ModelConfig
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.vision import AbstractTower
from lora_jax.sharding import Split
from lora_jax.vision.processor import ProcessorSettings, read_settings
from serving.api.config import EngineConfig
from serving.engine.images.front import ImageFront
from serving.steps.device_stopwatch import DeviceStopwatch
from serving.steps.image_encoder import ImageEncoder
from serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_ROWS = 16384  # of the encoder cache, if the context is not shorter


@dataclasses.dataclass(frozen=True, eq=False)
class ImageParts:
    """A tower taken off its language model, and sizes."""

    tower: AbstractTower
    settings: ProcessorSettings
    num_rows: int
    cache_bytes: int


def check_image_files(
    config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer
) -> None:
    """Raise ValueError for an image processor's settings or a tokenizer that do not fit the model.

    Only small files are read, before the weights are.
    """
    if model_config.vision is None:
        if config.mm_processor_kwargs:
            raise ValueError("mm_processor_kwargs is given, but this model takes text only.")
    elif not config.language_model_only:
        read_settings(Path(config.model), model_config.vision, config.mm_processor_kwargs)
        _placeholder(model_config, tokenizer)


def take_tower(
    config: EngineConfig, model: AbstractCausalLM, model_config: ModelConfig, dtype: jnp.dtype
) -> ImageParts | None:
    """Return the tower, which the model then lacks; None for a model of text.

    The step's program sees the language model alone; `check_image_files` comes first.
    """
    if model_config.vision is None:
        return None
    vision_model: Any = model
    tower, vision = vision_model.tower, model_config.vision
    del vision_model.tower
    if config.language_model_only:
        return None
    settings = read_settings(Path(config.model), vision, config.mm_processor_kwargs)
    context = config.max_model_len or model_config.max_positions
    rows = config.encoder_cache_tokens or min(context, DEFAULT_ROWS)
    num_bytes = rows * (1 + len(vision.deepstack)) * vision.out_size * dtype.itemsize
    leaves = jax.tree.leaves(nnx.state(tower))
    logger.info(
        "Tower: %s, %.1f M parameters; encoder cache of %d tokens, %.1f MB.",
        vision.family,
        sum(leaf.size for leaf in leaves) / 1e6,
        rows,
        num_bytes / 1e6,
    )
    return ImageParts(tower, settings, rows, num_bytes)


def make_encoder(
    config: EngineConfig,
    parts: ImageParts,
    model_config: ModelConfig,
    module_names: tuple[str, ...],
    max_model_len: int,
    split: Split | None = None,
) -> ImageEncoder:
    """Return the encoder of a model runner."""
    return ImageEncoder(
        parts.tower,
        model_config,
        parts.settings,
        module_names,
        num_rows=parts.num_rows,
        max_image_tokens=min(parts.num_rows, max_model_len),
        max_rank=config.max_lora_rank,
        split=split,
    )


def make_front(
    config: EngineConfig,
    parts: ImageParts,
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    max_model_len: int,
) -> ImageFront:
    """Return what prepares images of requests. ValueError for a tokenizer without their token."""
    return ImageFront(
        model_config.tower,
        parts.settings,
        placeholder=_placeholder(model_config, tokenizer),
        max_images=config.max_images,
        max_image_tokens=min(parts.num_rows, max_model_len),
        cache_bytes=int(config.mm_processor_cache_gb * (1 << 30)),
    )


def _placeholder(model_config: ModelConfig, tokenizer: Tokenizer) -> str:
    """Return the token that stands for images; ValueError where the tokenizer has none."""
    number = model_config.tower.image_token_id
    (placeholder,) = tokenizer.token_strs([number])
    if not placeholder:
        raise ValueError(f"The tokenizer has no token {number}, which stands for images.")
    return placeholder


class TowerCollector:
    """Images that the tower has computed, and its seconds on the device."""

    def __init__(self, stopwatch: DeviceStopwatch):
        self._stopwatch = stopwatch

    def describe(self) -> list[Metric]:
        """Return nothing: the series are made anew each time."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield the families."""
        counts = {
            "lora_jax:tower_images": ("Images that the tower has computed.", self._stopwatch.count),
            "lora_jax:tower_seconds": (
                "The tower's seconds on the device.",
                self._stopwatch.seconds,
            ),
        }
        for name, (text, value) in counts.items():
            family = CounterMetricFamily(name, text)
            family.add_metric([], value)
            yield family


def watch_tower(registry: CollectorRegistry, encoder: ImageEncoder | None) -> None:
    """Show the tower in the metrics, where there is one."""
    if encoder is not None:
        registry.register(TowerCollector(encoder.stopwatch))
