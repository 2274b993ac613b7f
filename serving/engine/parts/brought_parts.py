"""Room for what adapters bring beside LoRA, and the modules with it."""

import dataclasses
import os
from collections.abc import Mapping

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.gains import with_gains
from lora_jax.adapters.vocabulary import MOST_TOKENS, needs, with_vocabulary
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.output_norms import OutputNorms
from serving.api.config import EngineConfig
from serving.engine.memory.storage import INT8
from serving.engine.parts.early_checks import brought_by
from serving.engine.parts.head_parts import head_labels
from serving.engine.parts.pairs import GAINS, VOCABULARY, why_only_lora


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


def take_brought(
    model: AbstractCausalLM,
    catalogue: LoraCatalogue,
    config: EngineConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    *,
    has_server: bool,
) -> tuple[LoraCatalogue, OutputNorms | None]:
    """Return the catalogue with what adapters may bring, which the model then knows.

    Where they may bring nothing it says why. Beside it what computes their gains; None where they
    have none.
    """
    norms = None
    if why := why_only_lora(config, has_server=has_server):
        catalogue = dataclasses.replace(catalogue, only_lora=why)
    if takes_gains(config, adapters, has_server):
        norms = OutputNorms(model, config.max_lora_rank)
        norms.warm_up()
        catalogue = with_gains(catalogue, norms.modules)
    most_tokens, most_saved = vocabulary_room(config, adapters, has_server)
    if most_tokens or most_saved:
        tied = model.lm_head is None
        room = {"most_tokens": most_tokens, "most_saved": most_saved}
        catalogue = with_vocabulary(catalogue, tied=tied, **room)
    if norms is not None or most_tokens or most_saved:
        model.module_names = catalogue.module_names
    return catalogue, norms
