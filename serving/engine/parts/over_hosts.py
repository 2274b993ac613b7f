"""An engine over several hosts: what it does not work together with, and the ranks that follow.

Every process builds the same parts from the same config. Rank 0 has the engine; the others do what
its runner does, in the same order, and read no clock, no adapter and no request.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from serving.api.config import EngineConfig
from serving.runtime.gang import Gang


def check_gang(config: EngineConfig, gang: Gang | None) -> EngineConfig:
    """Return the config as it is over hosts: without room for ESFT adapters.

    Raises ValueError for what an instance over several hosts does not work together with.
    """
    if gang is None:
        return config
    if config.tensor_parallel_size < gang.size or config.tensor_parallel_size % gang.size:
        raise ValueError(
            f"tensor_parallel_size {config.tensor_parallel_size} must be a multiple of the "
            f"{gang.size} nodes, each of which has an equal part of the devices."
        )
    refused = {
        "max_esft_adapters": config.max_esft_adapters,
        "kv_offloading_size": config.kv_offloading_size,
    }
    if wrong := [name for name, value in refused.items() if value]:
        raise ValueError(f"An instance over several hosts has no {' and '.join(wrong)}: set 0.")
    return dataclasses.replace(config, max_esft_adapters=0)


def shared[T](gang: Gang | None, value: T) -> T:
    """Return rank 0's value; without a gang the value itself."""
    return value if gang is None else gang.shared(value)


def teller(gang: Gang | None) -> Callable[[Any], None]:
    """Return what tells the other processes a command."""
    return gang.tell if gang is not None and gang.is_leader else _tell_nobody


def _tell_nobody(command: Any) -> None:
    """One process has all devices, or another one tells."""
