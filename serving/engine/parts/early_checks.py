"""Checks of adapters' small files, before a model is loaded. No jax."""

import os
from collections.abc import Mapping
from pathlib import Path

from lora_jax.adapters.adapter_folders import check_folders
from lora_jax.adapters.entries import RegistryLimits
from lora_jax.adapters.esft_format import CONFIG_FILE
from serving.api.config import EngineConfig


def limits_of(config: EngineConfig) -> RegistryLimits:
    """Return the limits of an engine's registry of adapters."""
    return RegistryLimits(
        max_total_bytes=config.max_total_adapter_bytes,
        max_in_memory=config.max_cpu_loras,
        max_file_bytes=config.max_adapter_bytes,
        max_rank=config.max_lora_rank,
        loads_per_minute=config.max_adapter_loads_per_minute,
    )


def check_adapters(config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]]) -> None:
    """Raise AdapterRejected or AdapterNotFound for a folder whose names or config say enough.

    With load_format dummy the folders need no weights, and are left to their loads.
    """
    if config.load_format != "dummy":
        check_folders(adapters, limits_of(config))


def check_hosts_adapters(adapters: Mapping[str, str | os.PathLike[str]]) -> None:
    """Raise ValueError naming an adapter that a model over several hosts does not serve."""
    for name, path in adapters.items():
        if (Path(path) / CONFIG_FILE).is_file():
            raise ValueError(
                f"Adapter {name!r} is an ESFT adapter, and an instance over several hosts serves "
                "LoRA alone: leave it out, or serve the model on the devices of one host, with "
                "--nnodes 1."
            )
