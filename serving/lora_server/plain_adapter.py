"""Adapters of isolation `server`: plain LoRA, whatever process computes it. No jax."""

import contextlib
from pathlib import Path

from lora_jax.adapters import reader
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.adapters.formats.head_format import HEAD_FILE
from lora_jax.adapters.formats.peft_format import CONFIG_FILE, read_config
from lora_jax.adapters.formats.peft_vocabulary import needs
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.config import ModelConfig
from lora_jax.hub_folder import folder_name

_ADVICE = "isolation 'server' computes plain LoRA adapters alone; use isolation 'process'."


def read_plain(
    name: str, folder: str, model: str, config: ModelConfig, catalogue: LoraCatalogue, max_rank: int
) -> AdapterWeights:
    """Return the adapter in a folder, for the base model in the folder `model`.

    Raises ValueError, with the adapter's `name`, for one that is more than LoRA.
    """
    more = _more_than_lora(Path(folder))  # a reader without room for it would say how to make some
    if more is not None:
        raise ValueError(f"{name} has {more}: {_ADVICE}")
    names = (folder_name(model), *([config.original] if config.original else []))
    limits = reader.AdapterReadLimits(max_rank=max_rank)
    weights = reader.read(Path(folder), catalogue, base_names=names, limits=limits)
    if not isinstance(weights, AdapterWeights):
        raise ValueError(f"{name} is no plain LoRA adapter: {_ADVICE}")
    if weights.report.brings:
        raise ValueError(f"{name} brings {', '.join(weights.report.brings)} beside LoRA: {_ADVICE}")
    return weights


def _more_than_lora(path: Path) -> str | None:
    """Return what the small files say; None of a folder that the reader refuses, too."""
    with contextlib.suppress(OSError, ValueError):
        folder = AdapterFolder(path)
        if HEAD_FILE in folder.files():
            return "a task head"
        if CONFIG_FILE in folder.files():
            brought = read_config(folder, has_head=True, brings=True)
            if brought.has_gains:
                return "DoRA or trained biases"
            if any(needs(brought)):
                return "trained tokens or modules of its own"
    return None
