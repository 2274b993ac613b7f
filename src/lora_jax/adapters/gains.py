"""Outputs that adapters scale and shift: DoRA, biases of LoRA, trained biases of the base. No jax.

A map that gives y = W x + b + scaling * B A x then gives y + gain * y + shift, where

    gain = magnitude / norm - 1             norm[i] = ||(W + scaling * B A)[i]||, 0 without DoRA
    shift = b_trained - (1 + gain) * b + scaling * lora_B.bias

Both are rows of the map's width, stored as two rank rows of a site of their own.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.peft_config import PeftConfig
from lora_jax.adapters.peft_names import Target, find_target
from lora_jax.adapters.safetensors_file import AdapterTensor
from lora_jax.adapters.weights import AdapterWeights, RawGain, SiteWeights

ROWS = 2  # gain and shift
_SUFFIX = ".gain"
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


def gain_name(module: str) -> str:
    """Return the name of the module that holds the gain and shift of another one."""
    return module + _SUFFIX


def is_gain(module: str) -> bool:
    """Return whether a module holds the gain and shift of another one."""
    return module.endswith(_SUFFIX)


def with_gains(catalogue: LoraCatalogue, modules: Iterable[str]) -> LoraCatalogue:
    """Return the catalogue with room for gain and shift of these modules, in every layer."""
    added = {}
    for name in sorted(set(modules) & catalogue.modules.keys()):
        width, layers = catalogue.modules[name].d_out, catalogue.modules[name].layers
        gain = gain_name(name)
        added[gain] = LoraModule(gain, width, width, layers, most_rank=ROWS)
    return dataclasses.replace(catalogue, modules={**catalogue.modules, **added})


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


def gain_site(
    raw: RawGain, norm: np.ndarray | None, bias: np.ndarray | None, where: str
) -> SiteWeights:
    """Return gain and shift as rows [1, 2, d_out], given the weights' norm and the base's bias.

    Raises ValueError naming `where` for a bias that the base does not have, and a norm of 0.
    """
    if raw.bias is not None and bias is None:
        raise ValueError(f"the base model has no bias at {where}, and the adapter trained one.")
    width = next(len(v) for v in (raw.magnitude, raw.shift, raw.bias) if v is not None)
    rows = np.zeros((1, ROWS, width), np.float32)
    gain, shift = rows[0]
    if raw.magnitude is not None and norm is not None:
        if not norm.all():
            raise ValueError(f"DoRA at {where}: an output of the adapted weights has norm 0.")
        gain[:] = raw.magnitude / norm - 1
    if bias is not None:
        shift += (bias if raw.bias is None else raw.bias) - (1 + gain) * bias
    if raw.shift is not None:
        shift += raw.shift
    return SiteWeights(rows, rows, 1.0)


def resolved(weights: AdapterWeights, made: Mapping[_Site, SiteWeights]) -> AdapterWeights:
    """Return the adapter with sites for its gains, `made` of them by their modules' names."""
    sites = dict(weights.sites)
    for (module, layer), site in made.items():
        sites[gain_name(module), layer] = site
    size = weights.report.weight_bytes + sum(site.a.nbytes for site in made.values())
    report = dataclasses.replace(weights.report, weight_bytes=size)
    return dataclasses.replace(weights, sites=sites, report=report, gains={})
