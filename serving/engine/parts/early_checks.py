"""Checks of adapters' small files, before a model is loaded. No jax."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_jax.adapters.adapter_folders import check_folders
from lora_jax.adapters.entries import RegistryLimits
from lora_jax.adapters.formats.esft_format import CONFIG_FILE
from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.adapters.formats.peft_config import PeftConfig
from lora_jax.adapters.formats.peft_format import CONFIG_FILE as PEFT_FILE
from lora_jax.adapters.formats.peft_format import WEIGHTS_FILE, read_config
from lora_jax.adapters.formats.peft_vocabulary import needs
from lora_jax.adapters.formats.safetensors_file import tensor_names
from serving.api.config import EngineConfig
from serving.engine.parts.pairs import why_only_lora

_OF_EXPERTS = re.compile(r"(.*\.)?experts\.")  # names of tensors, but not "shared_experts."


def limits_of(config: EngineConfig) -> RegistryLimits:
    """Return the limits of an engine's registry of adapters."""
    return RegistryLimits(
        max_total_bytes=config.max_total_adapter_bytes,
        max_in_memory=config.max_cpu_loras,
        max_file_bytes=config.max_adapter_bytes,
        max_rank=config.max_lora_rank,
        loads_per_minute=config.max_adapter_loads_per_minute,
    )


def check_adapters(config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]]) -> None:
    """Raise AdapterRejected or AdapterNotFound for a folder whose names or config say enough.

    With load_format dummy the folders need no weights, and are left to their loads.
    """
    if config.load_format != "dummy":
        check_folders(adapters, limits_of(config))


def check_plain(
    config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]], *, has_server: bool
) -> None:
    """Raise ValueError naming an adapter that brings more than LoRA to an engine for LoRA alone."""
    # Of the others than the merged one: they are of other instances.
    why = why_only_lora(dataclasses.replace(config, merge_adapter=None), has_server=has_server)
    for name, brought in brought_by(adapters) if why else ():
        if brought.has_gains or any(needs(brought)):
            raise ValueError(
                f"Adapter {name!r} has DoRA, biases, trained tokens or modules of its own, and "
                f"that does not go with {why}: leave one of them out."
            )


def check_primary(config: EngineConfig, adapters: Mapping[str, str | os.PathLike[str]]) -> None:
    """Raise ValueError for a merge_adapter that is not given, or that no merged weights stand for.

    Names of its tensors and its config tell; a folder that cannot be read is left to its load.
    """
    name = config.merge_adapter
    if name is None:
        return
    if name not in adapters:
        raise ValueError(
            f"merge_adapter {name!r} is not among the adapters that are given: name one of them, "
            "or leave merge_adapter out."
        )
    names: tuple[str, ...] = ()
    with contextlib.suppress(OSError, ValueError):
        names = tensor_names(Path(adapters[name]) / WEIGHTS_FILE)
    why = "experts, which" if any(map(_OF_EXPERTS.match, names)) else ""
    for _, brought in brought_by({name: adapters[name]}):
        if brought.has_gains or any(needs(brought)):
            why = "more than LoRA (DoRA, biases, trained tokens or modules of its own), which"
    if why:
        raise ValueError(
            f"merge_adapter {name!r} cannot be merged: it changes {why} merged weights of dense "
            "maps do not stand for. Name another adapter, or leave merge_adapter out."
        )


def brought_by(
    adapters: Mapping[str, str | os.PathLike[str]],
) -> Iterator[tuple[str, PeftConfig]]:
    """Yield names and configs of PEFT folders; the load of another one says what is wrong."""
    for name, path in adapters.items():
        with contextlib.suppress(OSError, ValueError):
            folder = AdapterFolder(Path(path))
            if PEFT_FILE in folder.files():
                yield name, read_config(folder, has_head=True, brings=True)


def check_hosts_adapters(adapters: Mapping[str, str | os.PathLike[str]]) -> None:
    """Raise ValueError naming an adapter that a model over several hosts does not serve."""
    for name, path in adapters.items():
        if (Path(path) / CONFIG_FILE).is_file():
            raise ValueError(
                f"Adapter {name!r} is an ESFT adapter, and an instance over several hosts serves "
                "LoRA alone: leave it out, or serve the model on the devices of one host, with "
                "--nnodes 1."
            )
