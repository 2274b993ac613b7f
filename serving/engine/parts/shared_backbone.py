"""An engine over another process's weights: what it works together with, and its source of them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from lora_jax.adapters.weights import AnyWeights
from lora_jax.memory.arena import ImportedArena
from lora_jax.models.loader import read_config
from lora_jax.models.shared_weights import load_from_arena
from serving.api.config import EngineConfig
from serving.api.load_format import WeightSource, weight_source


def check_backbone(config: EngineConfig, has_server: bool) -> EngineConfig:
    """Return the config of an engine over a shared backbone, without room for ESFT adapters.

    ESFT moves the experts to pages of the engine's own, which is a second copy. Raises ValueError
    for every other thing that such an engine does not work together with.
    """
    refused = {
        f"tensor_parallel_size {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
        f"load_format {config.load_format}": config.load_format != "auto",
        f"max_esft_adapters {config.max_esft_adapters}": bool(config.max_esft_adapters),
        f"lora_merge {config.lora_merge}": config.lora_merge != "off",
        f"merge_adapter {config.merge_adapter}": config.merge_adapter is not None,
        "lora_server": has_server,
        "a model that takes images": read_config(Path(config.model)).vision is not None,
    }
    reasons = [name for name, is_set in refused.items() if is_set]
    if reasons:
        raise ValueError(
            f"A function over a shared backbone does not work with {', '.join(reasons)}: it has "
            "one device, weights from files, text and LoRA adapters. Leave that out, or use an "
            "engine without functions."
        )
    return dataclasses.replace(config, max_esft_adapters=0)


def source_of(
    config: EngineConfig,
    backbone: ImportedArena | None,
    read_adapter: Callable[..., AnyWeights] | None = None,
) -> WeightSource:
    """Return the source of the base model's weights: files, or the backbone's memory.

    Adapters are read from their files, or by `read_adapter`.
    """
    source = weight_source(config.load_format)
    if read_adapter is not None:
        source = dataclasses.replace(source, read_adapter=read_adapter)
    if backbone is None:
        return source
    return dataclasses.replace(
        source,
        load_model=lambda path, dtype, split: load_from_arena(path, backbone, dtype=dtype),
        is_shared=True,
    )
