"""An engine over several hosts: its config, and what rank 0 tells the ranks that follow.

Every process builds the same parts from the same config. Rank 0 has the engine; the others do what
its runner does, in the same order, and read no clock, no adapter and no request.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from serving.api.config import EngineConfig
from serving.runtime.gang import Gang


def for_hosts(config: EngineConfig, gang: Gang | None) -> EngineConfig:
    """Return the config as it is over hosts: without room for ESFT adapters.

    Raises ValueError where the nodes cannot have equal parts of the devices.
    """
    if gang is None:
        return config
    if config.tensor_parallel_size < gang.size or config.tensor_parallel_size % gang.size:
        raise ValueError(
            f"tensor_parallel_size {config.tensor_parallel_size} must be a multiple of the "
            f"{gang.size} nodes, each of which has an equal part of the devices."
        )
    return dataclasses.replace(config, max_esft_adapters=0)


def shared[T](gang: Gang | None, value: T) -> T:
    """Return rank 0's value; without a gang the value itself."""
    return value if gang is None else gang.shared(value)


def teller(gang: Gang | None) -> Callable[[Any], None]:
    """Return what tells the other processes a command."""
    return gang.tell if gang is not None and gang.is_leader else _tell_nobody


def _tell_nobody(command: Any) -> None:
    """One process has all devices, or another one tells."""
