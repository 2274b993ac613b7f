"""Checks that a base model can have ESFT adapters, before its weights are read. No jax."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from lora_jax.adapters.formats.esft_format import CONFIG_FILE
from lora_jax.adapters.formats.safetensors_file import tensor_names
from lora_jax.config import ModelConfig
from serving.api.config import EngineConfig

QUANTISED = "the base's experts are quantised, and those of ESFT adapters are not"
# Ends of names that tensors have beside codes, or in place of plain values (models.quantised).
_PARTS = re.compile(
    r"(.*\.)?experts\..*(\.qweight|\.weight_packed|\.absmax|_scale|_scale_inv|_blocks)"
)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def check_esft(
    config: EngineConfig, model: ModelConfig, adapters: Mapping[str, str | os.PathLike[str]]
) -> None:
    """Raise ValueError where ESFT was asked for, or an ESFT folder given, in vain."""
    wanted = config.max_esft_adapters
    folders = [name for name, path in adapters.items() if (Path(path) / CONFIG_FILE).is_file()]
    if not wanted and not folders:
        return
    if config.merge_adapter in folders:
        raise ValueError(
            f"merge_adapter {config.merge_adapter!r} is an ESFT adapter, and only LoRA is merged: "
            "name another adapter, or leave merge_adapter out."
        )
    why = why_no_esft(model) or (QUANTISED if _has_quantised(config, model) else "")
    if wanted and why:
        raise ValueError(f"max_esft_adapters is {wanted}, but {why}: set it to 0.")
    if folders and (why or wanted == 0):
        why = why or "max_esft_adapters is 0, which leaves no room for it"
        change = "set another number" if wanted == 0 else "choose another base model"
        raise ValueError(
            f"Adapter {folders[0]!r} is an ESFT adapter, but {why}: leave it out, or {change}."
        )


def why_no_esft(model: ModelConfig) -> str:
    """Return why a config.json rules ESFT adapters out; "" where it does not."""
    if model.moe is None or not model.moe.layers:
        return f"the model ({model.model_type}) has no experts"
    if model.moe.bias:
        return f"the experts of {model.model_type} have biases, which ESFT files lack"
    return ""


def _has_quantised(config: EngineConfig, model: ModelConfig) -> bool:
    """Return whether the names of a checkpoint's tensors say that its experts are quantised.

    A config.json alone does not: it may leave modules out. False where files cannot be read, of
    which the load says what is wrong.
    """
    if model.quantization is None or config.load_format == "dummy":
        return False
    try:
        return any(_PARTS.fullmatch(name) for name in _tensor_names(Path(config.model)))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _tensor_names(folder: Path) -> list[str]:
    """Return the names of a checkpoint's tensors, by its index or by the header of its one file."""
    if (folder / _INDEX).is_file():
        return list(json.loads((folder / _INDEX).read_bytes())["weight_map"])
    return list(tensor_names(folder / _SINGLE))
