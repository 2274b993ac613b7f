"""Spellings of a language model's tensors and adapter paths where it is part of a larger model."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule, NameRule
from lora_jax.models.sources import Flatten, Source, Tensor, WeightRule, weight
from lora_jax.nn.adapter_sites import by_name

# What stands before `layers.` and `embed_tokens.`: transformers 5, LLaVA's and Qwen2.5-VL's hubs.
_TEXT = ("model.language_model.", "language_model.model.", "model.")
_HEAD = ("lm_head.", "language_model.lm_head.")
_PATHS = "(?:model.language_model|language_model.model|language_model|model)."
_HEAD_PATHS = "(?:lm_head|language_model.lm_head)"


def respelled_weights(rules: Sequence[WeightRule]) -> tuple[WeightRule, ...]:
    """Return a language model's rules with every spelling of its tensors as an alternative."""
    return tuple(WeightRule(rule.parameter, tuple(_spellings(rule.sources))) for rule in rules)


def _spellings(sources: Sequence[Source]) -> list[Source]:
    spelled = []
    for source in sources:
        name = next(iter(source.names()))
        old, choices = ("lm_head.", _HEAD) if name.startswith("lm_head.") else ("model.", _TEXT)
        spelled += [renamed(source, old, new) for new in choices]
    return spelled


def renamed(source: Any, old: str, new: str) -> Any:
    """Return the source with `new` in place of the beginning `old` of its tensors' names."""
    inner = [name for name in ("of", "sibling") if hasattr(source, name)]
    if inner:
        changed = {name: renamed(getattr(source, name), old, new) for name in inner}
        return dataclasses.replace(source, **changed)
    assert source.name.startswith(old), source.name
    return dataclasses.replace(source, name=new + source.name.removeprefix(old))


def tower_weights(
    places: Sequence[str], names: Mapping[str, str], patches: tuple[str, str]
) -> tuple[WeightRule, ...]:
    """Return a tower's rules: parameter to tensor, below each of its places in checkpoints.

    `patches` are parameter and tensor of the patches' embedding, a convolution's kernel in files.
    """
    rules = [weight(ours, *(f"{at}.{name}" for at in places)) for ours, name in names.items()]
    parameter, kernel = patches
    return (*rules, weight(parameter, *(Flatten(Tensor(f"{at}.{kernel}")) for at in places)))


def join_catalogues(
    text: LoraCatalogue,
    modules: Sequence[LoraModule],
    rules: Sequence[NameRule],
    model_type: str,
) -> LoraCatalogue:
    """Return the catalogue of a language model, in every spelling, and of its tower."""
    ours = (*_respelled_paths(text.rules), *rules)
    layers = max(text.num_layers, *(1 + max(m.layers) for m in modules))
    every = text.modules | by_name(modules)
    return dataclasses.replace(
        text, model_type=model_type, num_layers=layers, modules=every, rules=ours
    )


def _respelled_paths(rules: Sequence[NameRule]) -> list[NameRule]:
    respelled = []
    for rule in rules:
        pattern = rule.pattern.pattern
        if pattern.startswith(r"model\."):
            pattern = _PATHS.replace(".", r"\.") + pattern.removeprefix(r"model\.")
        elif pattern == "lm_head":
            pattern = _HEAD_PATHS.replace(".", r"\.")
        respelled.append(dataclasses.replace(rule, pattern=re.compile(pattern)))
    return respelled
