"""Devices of an engine: how many this process needs, and the split of the model over them."""

import contextlib
import logging
from pathlib import Path

import jax

from lora_jax.models.loader import read_config
from lora_jax.models.split import make_split
from lora_jax.sharding import Split
from serving.api.config import EngineConfig

logger = logging.getLogger(__name__)


def split_of(config: EngineConfig) -> Split | None:
    """Return the split that the config asks for, None for one device; nothing is loaded yet.

    On a CPU as many devices are made as are asked for, if jax has not made its own before. Raises
    ValueError for a model that cannot be split so, and where there are too few devices.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return None
    _make_cpu_devices(size)
    parallel = config.enable_expert_parallel
    return make_split(read_config(Path(config.model)), size, expert_parallel=parallel)


def log_devices(split: Split | None) -> None:
    """Log where the model lies."""
    if split is None:
        logger.info("Mesh: one device, %s.", jax.devices()[0])
        return
    names = ", ".join(map(str, split.mesh.devices.flat))
    by = {"ep": "whole experts", "tp": "a part of each expert"}[split.experts]
    how = "the GPUs' own all-gather" if split.group else "jax.lax.all_gather"
    logger.info("Mesh: %d devices (%s); %s on each; exchange by %s.", split.size, names, by, how)


def _make_cpu_devices(size: int) -> None:
    """Have jax make so many CPU devices; it does so at its start only, and refuses later."""
    if max(1, jax.config.jax_num_cpu_devices) < size:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", size)
