"""Rotary embeddings as config.json spells them, in either dialect."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from lora_jax.config._keys import Keys
from lora_jax.config._types import RopeConfig


def read_rope(keys: Keys, dim: int, default_theta: float) -> RopeConfig:
    """Return the rotary embedding of `dim` numbers, by `rope_parameters` or `rope_scaling`.

    Raises ValueError naming the key whose value is not supported.
    """
    section = keys.section("rope_parameters" if keys.raw.get("rope_parameters") else "rope_scaling")
    if any(isinstance(value, Mapping) for value in section.raw.values()):
        raise ValueError(f"{section.where}: one rope per layer type is not supported.")
    kind = section.get("rope_type", "type", default="default")
    if kind not in _ROPE_FIELDS:
        allowed = ", ".join(sorted(_ROPE_FIELDS))
        raise ValueError(f"{section.where}: rope type {kind!r} is not supported, only {allowed}.")
    for part in (keys, section):
        part.only("partial_rotary_factor", 1.0)
    theta = section.number("rope_theta", default=keys.number("rope_theta", default=default_theta))
    return RopeConfig(kind, dim, theta, **_ROPE_FIELDS[kind](keys, section))


def _llama3_fields(keys: Keys, section: Keys) -> dict[str, Any]:
    return {
        "factor": section.number("factor"),
        "low_freq_factor": section.number("low_freq_factor"),
        "high_freq_factor": section.number("high_freq_factor"),
        "original_max_positions": _original_positions(keys, section),
    }


def _yarn_fields(keys: Keys, section: Keys) -> dict[str, Any]:
    original = _original_positions(keys, section)
    longer = keys.size("max_position_embeddings", "max_seq_len") / original
    factor = section.number("factor", default=longer)
    mscale = section.number("mscale", default=0.0)
    all_dim = section.number("mscale_all_dim", default=0.0)
    if mscale and all_dim:
        magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    else:
        magnitude = yarn_magnitude(factor, 1.0)
    return {
        "factor": factor,
        "original_max_positions": original,
        "beta_fast": section.number("beta_fast", default=32.0),
        "beta_slow": section.number("beta_slow", default=1.0),
        "truncate": section.flag("truncate", True),
        "magnitude": section.number("attention_factor", default=magnitude),
    }


def _original_positions(keys: Keys, section: Keys) -> int:
    trained = keys.size("max_position_embeddings", "max_seq_len")
    return section.size("original_max_position_embeddings", default=trained)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return YaRN's growth of the attention logits' temperature: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_ROPE_FIELDS: dict[str, Callable[[Keys, Keys], dict[str, Any]]] = {
    "default": lambda keys, section: {},
    "linear": lambda keys, section: {"factor": section.number("factor")},
    "llama3": _llama3_fields,
    "yarn": _yarn_fields,
}
