"""Room for what adapters bring beside LoRA, and the modules with it."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.folder import AdapterFolder
from lora_jax.adapters.gains import with_gains
from lora_jax.adapters.peft_config import PeftConfig
from lora_jax.adapters.peft_format import CONFIG_FILE, read_config
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.output_norms import OutputNorms
from serving.api.config import EngineConfig

_FLAG = "enable_dora_and_bias"


def takes_gains(
    config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]], has_server: bool
) -> bool:
    """Return whether adapters may have DoRA and biases: as the config says, else if some have.

    Raises ValueError for what that does not go with.
    """
    why = _why_not(config, has_server)
    if config.enable_dora_and_bias is None:
        return not why and any(c.has_gains for c in _configs(adapters.values()))
    if config.enable_dora_and_bias and why:
        raise ValueError(f"{_FLAG} does not go with {why}: leave {_FLAG} out, or the other.")
    return config.enable_dora_and_bias


def _why_not(config: EngineConfig, has_server: bool) -> str:
    """Return which feature does not go with adapters that bring more than LoRA; "" for none."""
    if has_server:
        return "a LoRA Server, which holds plain LoRA"
    if config.tensor_parallel_size > 1:
        return f"tensor_parallel_size {config.tensor_parallel_size}"
    if config.merge_adapter is not None:
        return f"merge_adapter {config.merge_adapter}, which changes the weights under them"
    return ""


def _configs(folders: Iterable[str | os.PathLike[str]]) -> Iterable[PeftConfig]:
    """Yield the configs of PEFT folders."""
    for path in folders:
        with contextlib.suppress(OSError, ValueError):  # its load says what is wrong
            folder = AdapterFolder(Path(path))
            if CONFIG_FILE in folder.files():
                yield read_config(folder, has_head=True, brings=True)


def take_brought(
    model: AbstractCausalLM,
    catalogue: LoraCatalogue,
    config: EngineConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    *,
    has_server: bool,
) -> tuple[LoraCatalogue, OutputNorms | None]:
    """Return the catalogue with what adapters may bring, which the model then knows.

    Beside it what computes their gains; None where they have none.
    """
    if not takes_gains(config, adapters, has_server):
        return catalogue, None
    norms = OutputNorms(model, config.max_lora_rank)
    norms.warm_up()
    catalogue = with_gains(catalogue, norms.modules)
    model.module_names = catalogue.module_names
    return catalogue, norms
