"""Modules that adapters of an engine may change, where they are not all."""

import logging
import os
from collections.abc import Iterable, Mapping

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.target_modules import modules_changed, modules_named
from lora_jax.nn.decoder import AbstractCausalLM
from serving.api.config import GIVEN_MODULES, EngineConfig
from serving.engine.parts.over_hosts import shared
from serving.lora_server.shared_side import SharedSide
from serving.lora_server.sides import RemoteSide
from serving.runtime.gang import Gang

logger = logging.getLogger(__name__)


def take_targets(
    model: AbstractCausalLM,
    catalogue: LoraCatalogue,
    config: EngineConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    gang: Gang | None,
    *,
    is_shared: bool,
) -> LoraCatalogue:
    """Return the catalogue of lora_target_modules, which the model then knows.

    Where the weights are shared between functions, so are programs: GIVEN_MODULES are all. Over
    hosts rank 0 says which modules: it alone has adapters. Raises ValueError for a name of no
    module.
    """
    names = shared(gang, config.lora_target_modules)
    if names is None or (is_shared and names == GIVEN_MODULES):
        return catalogue
    kept = shared(gang, open_modules(catalogue, names, adapters.values()))
    if not kept:
        return catalogue
    catalogue = catalogue.only(kept)
    model.module_names = catalogue.module_names
    if catalogue.closed:
        logger.info("Adapters may have LoRA on %s alone.", ", ".join(catalogue.module_names))
    return catalogue


def take_sites(
    model: AbstractCausalLM, catalogue: LoraCatalogue, remote: RemoteSide | None
) -> LoraCatalogue:
    """Return the catalogue of what another process computes, where one has all adapters whole."""
    if not isinstance(remote, SharedSide):
        return catalogue
    catalogue = catalogue.only(remote.link.layout.shard.modules)
    model.module_names = catalogue.module_names
    return catalogue


def open_modules(
    catalogue: LoraCatalogue,
    names: tuple[str, ...],
    folders: Iterable[str | os.PathLike[str]],
) -> frozenset[str] | None:
    """Return the modules that lora_target_modules stands for; None or empty: all.

    `folders` are those of the adapters. Raises ValueError for a name of no module.
    """
    if names == GIVEN_MODULES:
        return modules_changed(folders, catalogue)
    try:
        return modules_named(names, catalogue)
    except ValueError as error:
        raise ValueError(f"lora_target_modules: {error}") from None
