"""Room for adapters' task heads in an engine: number of labels, and the modules with it."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.head_format import labels_of
from lora_jax.adapters.task_head import with_head
from lora_jax.nn.decoder import AbstractCausalLM
from serving.api.config import EngineConfig


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


def take_heads(
    model: AbstractCausalLM, catalogue: LoraCatalogue, hidden: int, labels: int
) -> LoraCatalogue:
    """Return what adapters may change; with `labels`, also heads, which the model then knows."""
    if labels:
        catalogue = with_head(catalogue, hidden, labels)
        model.module_names = catalogue.module_names
    return catalogue
