"""Ranks of the adapters that are given at the start, from their configs alone. No jax.

Device memory is divided before adapters are read: they are read while programs are compiled.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from serving.api.config import EngineConfig

_MAX_CONFIG_BYTES = 1 << 20
# What takes more rank rows than `r` says.
_MORE = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices")


def usual_rank(config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]]) -> int | None:
    """Return the largest rank that adapters of a server have; None: up to max_lora_rank.

    It is known where all adapters are given and no folder has others.
    """
    if config.lora_dir is not None or not adapters:
        return None
    rank = largest_rank(adapters.values())
    return None if rank is None else min(rank, config.max_lora_rank)


def largest_rank(folders: Iterable[str | os.PathLike[str]]) -> int | None:
    """Return the largest rank in the folders' adapter_config.json; None: not all say it.

    A folder that cannot be read says nothing: loading it tells what is wrong.
    """
    ranks = [_rank_of(Path(folder) / "adapter_config.json") for folder in folders]
    known = [rank for rank in ranks if rank is not None]
    return max(known) if known and len(known) == len(ranks) else None


def _rank_of(file: Path) -> int | None:
    try:
        with file.open("rb") as content:
            found: Any = json.loads(content.read(_MAX_CONFIG_BYTES))
        if any(found.get(key) for key in _MORE):
            return None
        ranks = [found["r"], *(found.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return max(ranks) if all(type(rank) is int and rank > 0 for rank in ranks) else None
