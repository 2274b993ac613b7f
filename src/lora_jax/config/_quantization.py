"""quantization_config of a config.json: which format the weights are stored in.

Every key that would change a weight is read or refused by name.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lora_jax.config._keys import Keys
from lora_jax.config._types import QuantizationConfig

_PACKED, _MXFP4_PACKED, _FLOAT = "pack-quantized", "mxfp4-pack-quantized", "float-quantized"
_MXFP4_GROUP = 32


def read_quantization(keys: Keys) -> QuantizationConfig | None:
    """Return the format of a config's weights; None where none is quantised.

    Raises:
        ValueError: naming the method, the key or the value that is not supported.
    """
    section = quantization_section(keys.raw, keys.where)
    if not section.raw:
        return None
    method = section.get("quant_method", default=None)
    if not isinstance(method, str) or method not in _METHODS:
        allowed = ", ".join(sorted(_METHODS))
        raise ValueError(
            f"{section.where}: quant_method {method!r} is not supported, only {allowed}."
        )
    found = _METHODS[method](section)
    return dataclasses.replace(found, kv_scales=bool(section.raw.get("kv_cache_scheme")))


def quantization_section(raw: Mapping[str, Any], where: str) -> Keys:
    """Return the section of a config.json that says how weights are stored; empty for none.

    Raises ValueError for a section that is no object; `where` begins the message.
    """
    keys = Keys(raw, where)
    for name in ("quantization_config", "compression_config"):  # an older compressed-tensors'
        if (section := keys.section(name)).raw:
            return section
    return keys.section("text_config").section("quantization_config")


def _bitsandbytes(keys: Keys) -> QuantizationConfig:
    if keys.flag("load_in_8bit") or not keys.flag("load_in_4bit"):
        raise ValueError(
            f"{keys.where}: load_in_8bit is not supported; bitsandbytes files are read where "
            "load_in_4bit is true."
        )
    kind = keys.get("bnb_4bit_quant_type", default="fp4")
    _only(keys, "bnb_4bit_quant_type", kind, "nf4", "fp4")
    return QuantizationConfig("bitsandbytes", str(kind))


def _fp8(keys: Keys) -> QuantizationConfig:
    keys.only("fmt", "e4m3", "float8_e4m3fn")
    keys.only("activation_scheme", "dynamic", "static")
    keys.only("expert_dtype", "fp8")
    return QuantizationConfig("fp8", "fp8", block=_block(keys, "weight_block_size"))


def _block(keys: Keys, name: str) -> tuple[int, int] | None:
    """Return rows and columns of a block of FP8 weights, None where there are none."""
    block = keys.get(name, default=None)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
        raise ValueError(f"{keys.where}: {name} is {block!r}, not two positive integers.")
    return block[0], block[1]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _gptq(keys: Keys) -> QuantizationConfig:
    _only(keys, "bits", keys.size("bits"), 4)
    keys.only("is_marlin_format", False)
    keys.only("checkpoint_format", "gptq", "gptq_v2")
    keys.only("format", "gptq", "gptq_v2")  # the same, as some releases of GPTQModel name it
    second = keys.get("checkpoint_format", "format", default="gptq") == "gptq_v2"
    return QuantizationConfig(
        "gptq",
        "int4",
        group_size=_group_size(keys),
        symmetric=keys.flag("sym", True),
        zero_offset=0 if second else 1,
        desc_act=keys.flag("desc_act"),
    )


def _awq(keys: Keys) -> QuantizationConfig:
    _only(keys, "bits", keys.size("bits", "w_bit"), 4)
    for name in ("version", "format", "checkpoint_format"):  # the same, by release of the tool
        _only(keys, name, str(keys.get(name, default="gemm")).lower(), "gemm")
    if keys.get("backend", default=None) == "llm-awq":
        raise ValueError(
            f"{keys.where}: backend 'llm-awq' is not supported: it stores codes in an order of its "
            "own. Only version 'gemm' is."
        )
    return QuantizationConfig("awq", "int4", group_size=_group_size(keys), symmetric=False)


def _group_size(keys: Keys) -> int | None:
    """Return the weights of a row that share a scale, None for whole rows."""
    value = keys.get("group_size", "q_group_size", default=-1)
    if value == -1:
        return None
    size = keys.size("group_size", "q_group_size")
    if size % 2:
        raise ValueError(f"{keys.where}: group_size {size} is odd.")
    return size


def _mxfp4(keys: Keys) -> QuantizationConfig:
    if not keys.where.startswith("gpt_oss"):
        raise ValueError(
            f"{keys.where}: quantization_config 'mxfp4' is not supported, only for gpt_oss; other "
            f"models store MXFP4 as compressed-tensors ({_MXFP4_PACKED})."
        )
    return QuantizationConfig("mxfp4", "mxfp4", group_size=_MXFP4_GROUP)


def _compressed_tensors(keys: Keys) -> QuantizationConfig:
    if keys.get("transform_config", default=None):
        raise ValueError(f"{keys.where}: transform_config is not supported.")
    sparsity = keys.section("sparsity_config")
    sparsity.only("format", "dense")
    keys.only("quantization_status", "compressed", "frozen")
    groups = keys.section("config_groups")
    formats = {_weights_of(groups.section(name), keys) for name in groups.raw}
    if len(formats) != 1:
        listed = "; ".join(sorted(map(str, formats))) or "none"
        raise ValueError(f"{keys.where}: config_groups must be of one format, got {listed}.")
    return formats.pop()


def _weights_of(group: Keys, keys: Keys) -> QuantizationConfig:
    """Return the format of one entry of config_groups."""
    if group.get("output_activations", default=None):
        raise ValueError(f"{group.where}: output_activations are not supported.")
    weights = group.section("weights")
    weights.only("actorder", None, "weight", "static", False)
    weights.only("dynamic", False)
    form = group.get("format", default=keys.get("format", default=None))
    bits, kind = weights.get("num_bits", default=None), weights.get("type", default=None)
    strategy = weights.get("strategy", default="tensor")
    if form == _FLOAT and (bits, kind) == (8, "float"):
        _only(weights, "strategy", strategy, "block", "channel", "tensor")
        block = None
        if strategy == "block":
            weights.get("block_structure")  # required
            block = _block(weights, "block_structure")
        return QuantizationConfig("compressed-tensors", "fp8", block=block)
    if form == _PACKED and (bits, kind) == (4, "int"):
        _only(weights, "strategy", strategy, "group", "channel")
        size = _group_size(weights) if strategy == "group" else None
        symmetric = weights.flag("symmetric", True)
        return QuantizationConfig("compressed-tensors", "int4", size, None, symmetric)
    if form == _MXFP4_PACKED and (bits, kind) == (4, "float"):
        weights.only("group_size", _MXFP4_GROUP)
        return QuantizationConfig("compressed-tensors", "mxfp4", _MXFP4_GROUP)
    raise ValueError(
        f"{group.where}: format {form!r} of {bits!r} bits, type {kind!r} is not supported, only "
        f"{_FLOAT} of 8 bits float, {_PACKED} of 4 bits int and {_MXFP4_PACKED}."
    )


def _only(keys: Keys, name: str, value: Any, *allowed: Any) -> None:
    """Raise ValueError unless a value that was read is one of the allowed ones."""
    if value not in allowed:
        choices = " or ".join(repr(a) for a in allowed)
        raise ValueError(f"{keys.where}: {name} {value!r} is not supported, only {choices}.")


_METHODS: Mapping[Any, Callable[[Keys], QuantizationConfig]] = {
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
}
