"""Room for what adapters bring beside LoRA, and the modules with it."""

import dataclasses
import os
from collections.abc import Mapping

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.gains import with_gains
from lora_jax.adapters.vocabulary import with_vocabulary
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.output_norms import OutputNorms
from serving.api.config import EngineConfig
from serving.engine.parts.needed_sizes import takes_gains, vocabulary_room
from serving.engine.parts.pairs import why_only_lora


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
