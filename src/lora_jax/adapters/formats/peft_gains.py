"""Reading what a PEFT file says of a map's outputs: DoRA, biases of LoRA and of the base. No jax.

`lora_jax.adapters.gains` says what they compute.
"""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.formats.peft_config import PeftConfig
from lora_jax.adapters.formats.peft_names import Target, find_target
from lora_jax.adapters.formats.safetensors_file import AdapterTensor
from lora_jax.adapters.gains import gain_name, is_gain
from lora_jax.adapters.weights import RawGain, SiteWeights

_PATTERNS = {
    "magnitude": re.compile(r"base_model\.model\.(.+)\.lora_magnitude_vector(?:\.weight)?"),
    "shift": re.compile(r"base_model\.model\.(.+)\.lora_B\.bias"),
    "bias": re.compile(r"base_model\.model\.(.+?)(?:\.base_layer)?\.bias"),
}
_WORDS = {
    "magnitude": ("DoRA", "use_dora"),
    "shift": ("a bias of lora_B", "lora_bias"),
    "bias": ("trained biases of the base", "bias"),
}
_Site = tuple[str, int]
_Found = dict[str, dict[str, AdapterTensor]]  # by path, then by kind


def take_tensors(tensors: dict[str, AdapterTensor], config: PeftConfig) -> _Found:
    """Return the tensors of gains by module path, taken out of `tensors`.

    Raises ValueError for one that the config does not announce.
    """
    announced = {"magnitude": config.use_dora, "shift": config.lora_bias, "bias": config.has_bias}
    found: _Found = {}
    for name in tuple(tensors):
        for kind, pattern in _PATTERNS.items():
            if (match := pattern.fullmatch(name)) is None:
                continue
            if not announced[kind]:
                if kind == "bias":
                    continue  # it is left over, as any tensor that nothing explains
                words, key = _WORDS[kind]
                raise ValueError(f"{name}: {words}, which the config's {key} denies.")
            found.setdefault(match[1], {})[kind] = tensors.pop(name)
            break
    return found


def raw_gains(
    found: _Found,
    paths: Iterable[str],
    config: PeftConfig,
    sites: Mapping[_Site, SiteWeights],
    catalogue: LoraCatalogue,
) -> dict[_Site, RawGain]:
    """Return what the file says of the outputs of each site.

    `paths` are those of the modules that have LoRA. Raises ValueError naming a tensor that is
    missing, has a wrong shape, or is of a module whose outputs cannot be changed.
    """
    wanted = {"magnitude": config.use_dora, "shift": config.lora_bias}
    for path in paths:
        for kind in (kind for kind, is_wanted in wanted.items() if is_wanted):
            if kind not in found.get(path, {}):
                words, key = _WORDS[kind]
                raise ValueError(f"{path} has LoRA without {words}, which {key} announces.")
    gains: dict[_Site, RawGain] = {}
    for path, tensors in found.items():
        target = _target(path, tensors, catalogue)
        values = {kind: _vector(tensor, target) for kind, tensor in tensors.items()}
        row = 0
        for module in target.modules:
            part = {kind: vector[row : row + module.d_out] for kind, vector in values.items()}
            row += module.d_out
            site = module.name, target.layer
            if site in gains:
                raise ValueError(f"{path}: its outputs are changed under two names.")
            if "shift" in part:
                part["shift"] = part["shift"] * np.float32(sites[site].scaling)
            gains[site] = RawGain(**part)
    return gains


def _target(path: str, tensors: dict[str, AdapterTensor], catalogue: LoraCatalogue) -> Target:
    """Return what a path stands for; ValueError where its outputs cannot be changed."""
    name = next(iter(tensors.values())).name
    words = ", ".join(_WORDS[kind][0] for kind in tensors)
    if not any(map(is_gain, catalogue.modules)):
        raise ValueError(
            f"{name}: the adapter has {words}, and the server takes none: "
            f"{catalogue.what_to_change('enable_dora_and_bias')}."
        )
    target = find_target(path, catalogue)
    if target is None:
        raise ValueError(f"{name}: {words} on {path} is not supported, only on linear maps.")
    for module in target.modules:
        if target.expert is not None or gain_name(module.name) not in catalogue.modules:
            raise ValueError(f"{name}: {words} on {module.name} is not supported.")
    return target


def _vector(tensor: AdapterTensor, target: Target) -> np.ndarray:
    width = sum(module.d_out for module in target.modules)
    if tensor.shape != (width,):
        raise ValueError(f"{tensor.name} has shape {tensor.shape}; the base wants {(width,)}.")
    return tensor.read().astype(np.float32)


def words_of(gains: Mapping[_Site, RawGain]) -> tuple[str, ...]:
    """Return what these gains are made of, for people."""
    kinds = {kind for raw in gains.values() for kind in _WORDS if getattr(raw, kind) is not None}
    return tuple(_WORDS[kind][0] for kind in _WORDS if kind in kinds)
