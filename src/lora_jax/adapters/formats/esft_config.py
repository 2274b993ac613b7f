"""expert_cfg.json: which experts of which layers an ESFT adapter replaces. No jax.

Format (deepseek-ai/ESFT, `to_esft` of esft.py): {"experts": {"<layer>": [expert, ...]},
"shared_experts": bool, "non_expert_modules": bool}.
"""

from typing import Any

from lora_jax import strict_json

_MAX_VALUES = 1 << 17
_LISTED = 16
_REFUSED = {
    "shared_experts": "the adapter replaces the shared experts",
    "non_expert_modules": "the adapter replaces attention, embeddings, router and norms",
}


def parse(data: bytes) -> dict[int, tuple[int, ...]]:
    """Return the replaced experts of each layer, sorted, layers without any left out.

    Raises ValueError naming the key: for what is not this format, for keys nobody knows, and for
    adapters that replace more than routed experts, which all adapters of one base share.
    """
    raw = strict_json.read_object(data, _MAX_VALUES)
    unknown = sorted(raw.keys() - {"experts", *_REFUSED})
    if unknown:
        raise ValueError(f"unknown keys {', '.join(key[:80] for key in unknown)}.")
    for key, meaning in _REFUSED.items():
        value = raw.get(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false.")
        if value:
            raise ValueError(f"{key} is true: {meaning}, and only routed experts can be.")
    if not isinstance(raw.get("experts"), dict):
        raise ValueError("experts must map layers to lists of experts.")
    experts = {_layer(key): _experts(key, ids) for key, ids in raw["experts"].items()}
    if len(experts) < len(raw["experts"]):
        raise ValueError("experts names a layer twice.")
    return {layer: ids for layer, ids in sorted(experts.items()) if ids}


def _layer(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ValueError(f"experts: {key[:80]!r} is not the number of a layer.")
    return int(key)


def _experts(layer: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"experts of layer {layer} must be a list of numbers.")
    if len(set(ids)) < len(ids):
        shown = ", ".join(map(str, sorted(ids)[:_LISTED]))
        raise ValueError(f"experts of layer {layer} has an expert twice: {shown}, ...")
    return tuple(sorted(ids))
