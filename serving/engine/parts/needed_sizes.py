"""Sizes of an engine's programs that follow from its adapters' files.

A function asks for them before it imports the engine: no module of models is imported here.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from lora_jax.adapters.formats.head_format import labels_of
from lora_jax.adapters.formats.peft_vocabulary import needs
from lora_jax.adapters.vocabulary import MOST_TOKENS
from serving.api.config import EngineConfig
from serving.engine.parts.early_checks import brought_by
from serving.engine.parts.pairs import GAINS, INT8, VOCABULARY, why_only_lora


def head_labels(
    config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]], has_server: bool
) -> int:
    """Return how many labels a head may have: what the config says, else what the adapters have.

    0: no program has a trace of heads, as where a LoRA Server holds the adapters.
    """
    if has_server:
        return 0
    if config.max_lora_cls_labels is not None:
        return config.max_lora_cls_labels
    most = 0
    for folder in adapters.values():
        with contextlib.suppress(OSError, ValueError):  # its load says what is wrong
            most = max(most, labels_of(Path(folder)))
    return most


def takes_gains(
    config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]], has_server: bool
) -> bool:
    """Return whether adapters may have DoRA and biases: as the config says, else if some have."""
    why = why_only_lora(config, has_server=has_server)
    if config.enable_dora_and_bias is None:
        return not why and any(c.has_gains for _, c in brought_by(adapters))
    return config.enable_dora_and_bias


def vocabulary_room(
    config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]], has_server: bool
) -> tuple[int, int]:
    """Return (trained tokens of an adapter, whole matrices of all adapters) that have room.

    They are as the config says, else what the adapters have.
    """
    why = why_only_lora(config, has_server=has_server)
    needed = [] if why else [needs(c) for _, c in brought_by(adapters)]
    default = max((t for t, _ in needed), default=0), sum(saved for _, saved in needed)
    wanted = [getattr(config, flag) for flag in VOCABULARY]
    tokens, saved = (d if w is None else w for w, d in zip(wanted, default, strict=True))
    if config.lora_dtype == INT8:
        saved = 0  # the load of the adapter says that there is no room
    return min(tokens, MOST_TOKENS), saved


def needed_sizes(
    config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]]
) -> dict[str, int]:
    """Return fields with which an engine without these adapters has programs of the same shapes.

    They are those that the config leaves open and the adapters need; {} for plain LoRA.
    """
    sizes = {
        "max_lora_cls_labels": head_labels(config, adapters, False),
        GAINS: takes_gains(config, adapters, False),
        **dict(zip(VOCABULARY, vocabulary_room(config, adapters, False), strict=True)),
    }
    return {f: size for f, size in sizes.items() if size and getattr(config, f) is None}
