"""Puts quantised matrices in the place of the tensors that they are stored in."""

import copy
from collections.abc import Callable, Mapping

import numpy as np

from lora_jax.config import QuantizationConfig
from lora_jax.models.checkpoint import AbstractTensor, Checkpoint, CheckpointTensor
from lora_jax.models.quantised import bitsandbytes, fp8, gptq, packed
from lora_jax.models.quantised.forms import FLOAT8, AbstractQuantisedTensor

Tensors = Mapping[str, CheckpointTensor]
_WEIGHT = "weight"
# Ends of names that only one library's files have, and the quant_method that reads them.
_SIGNS: Mapping[str, str] = {
    ".qweight": "gptq or awq",
    ".weight_packed": "compressed-tensors",
    ".weight.absmax": "bitsandbytes",
}


def with_quantised(
    files: Checkpoint, config: QuantizationConfig | None, dtype: np.dtype
) -> Checkpoint:
    """Return a checkpoint in which every quantised matrix is one tensor, X.weight.

    Plain values of it are rounded to `dtype`. GPT-OSS's own names stay (models.sources.Mxfp4).

    Raises:
        ValueError: parts are missing or do not fit, no tensor is stored as the config says, or one
            in another way.
    """
    grouped = copy.copy(files)
    if config is not None and config.method != "mxfp4":
        matrices, used = _METHODS[config.method](files.tensors, config, dtype)
        if not matrices:
            raise ValueError(
                f"quantization_config names {config.method}, but no tensor is stored so."
            )
        kept = {name: t for name, t in files.tensors.items() if name not in used}
        both = sorted(kept.keys() & matrices.keys())
        if both:
            raise ValueError(f"Stored in 16 bits and quantised: {', '.join(both[:5])}.")
        grouped.tensors = kept | matrices
    _refuse_others(grouped, config)
    return grouped


def _refuse_others(files: Checkpoint, config: QuantizationConfig | None) -> None:
    """Raise ValueError for a tensor of a format that is not the config's."""
    said = "none" if config is None else f"{config.method} ({config.format})"
    for name, stored in files.tensors.items():
        needs = next((method for end, method in _SIGNS.items() if name.endswith(end)), None)
        if isinstance(stored, CheckpointTensor) and stored.dtype == FLOAT8:
            needs = "fp8 or compressed-tensors (float-quantized)"
        if needs is not None:
            raise ValueError(
                f"{name} is {stored.dtype} {stored.shape}, which needs a quantization_config of "
                f"{needs}; config.json has {said}. A checkpoint holds one format."
            )


_Found = tuple[dict[str, AbstractTensor], set[str]]


def _named(tensors: Tensors, config: QuantizationConfig, dtype: np.dtype) -> _Found:
    """Return matrices whose values are in X.weight itself, and every tensor that they use."""
    matrices: dict[str, AbstractTensor] = {}
    used: set[str] = set()
    for name in tensors:
        if config.format == "fp8":
            if tensors[name].dtype != FLOAT8:
                continue
            beside = fp8.names_of(name, tensors)
            matrices[name] = fp8.read(name, tensors, dtype, config.block)
        else:
            beside = bitsandbytes.names_of(name, tensors) if name.endswith(_WEIGHT) else ()
            if not beside:
                continue
            matrices[name] = bitsandbytes.read(name, tensors, dtype, config.format)
        used |= {name, *beside}
    return matrices, used


def _packed(tensors: Tensors, config: QuantizationConfig, dtype: np.dtype) -> _Found:
    """Return compressed-tensors' matrices, and every tensor that they use."""
    if config.format == "fp8":
        return _named(tensors, config, dtype)

    def read(site: str) -> AbstractQuantisedTensor:
        if config.format == "mxfp4":
            return packed.read_mxfp4(site, tensors, dtype)
        return packed.read_int4(site, tensors, dtype, config.group_size, config.symmetric)

    return _of_sites(tensors, "weight_packed", packed.names_of, read)


def _transposed(tensors: Tensors, config: QuantizationConfig, dtype: np.dtype) -> _Found:
    """Return GPTQ's or AWQ's matrices, and every tensor that they use."""
    awq = config.method == "awq"
    form = (dtype, config.group_size, config.symmetric, config.zero_offset)

    def read(site: str) -> AbstractQuantisedTensor:
        return gptq.read(site, tensors, *form, awq=awq, desc_act=config.desc_act)

    return _of_sites(tensors, "qweight", gptq.names_of, read)


def _of_sites(
    tensors: Tensors,
    part: str,
    names_of: Callable[[str, Tensors], tuple[str, ...]],
    read: Callable[[str], AbstractQuantisedTensor],
) -> _Found:
    matrices: dict[str, AbstractTensor] = {}
    used: set[str] = set()
    for name in tensors:
        if name.endswith(f".{part}"):
            site = name.removesuffix(part)
            matrices[f"{site}weight"] = read(site)
            used.update(names_of(site, tensors))
    return matrices, used


_METHODS: Mapping[str, Callable[[Tensors, QuantizationConfig, np.dtype], _Found]] = {
    "bitsandbytes": _named,
    "fp8": _named,
    "compressed-tensors": _packed,
    "gptq": _transposed,
    "awq": _transposed,
}
