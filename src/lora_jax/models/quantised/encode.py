"""Encoders: a matrix as bitsandbytes, transformers' FP8 or compressed-tensors would store it."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lora_jax.models.quantised.forms import BFLOAT16, FLOAT8, NF4, pack

NF4_BLOCK, NESTED_BLOCK = 64, 256
FP8_BLOCK = 128
INT4_GROUPS = (128, 64, 32)  # the largest that divides every map is taken
_FP8_MAX, _INT4_STEPS = 448.0, 7.5
_ROWS = 1024  # encoded at a time

Tensors = dict[str, np.ndarray]  # by what stands behind the map's path


@functools.cache
def dynamic_map() -> np.ndarray:
    """Return float32 [256], ascending: bitsandbytes' signed dynamic map of 8 bits.

    Seven decades below 1, the one from 10**-i with twice the values of the one below it; 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        bounds = np.linspace(0.1, 1, 2**decade + 1, dtype=np.float32)
        means = 10.0 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [*means, *-means]
    return np.sort(np.array(values, np.float32))


def nearest(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return uint8 places of the nearest value of an ascending table."""
    middles = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middles, values).astype(np.uint8)


def nf4(w: np.ndarray) -> Tensors:
    """Return a float32 matrix [d_out, d_in] in NF4 with nested scales; d_in a multiple of 64."""
    blocks = w.reshape(-1, NF4_BLOCK)
    absmax = np.abs(blocks).max(axis=1)
    table, codes = np.array(NF4, np.float32), np.empty(blocks.shape, np.uint8)
    inverse = np.divide(1, absmax, out=np.zeros_like(absmax), where=absmax > 0)
    for start in range(0, len(blocks), _ROWS):
        part = slice(start, start + _ROWS)
        codes[part] = nearest(table, blocks[part] * inverse[part, None])
    packed = pack(codes)
    nested, state = _nested(absmax)
    state |= {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "bfloat16"}
    text = json.dumps(state | {"shape": list(w.shape)}).encode()
    return {
        "weight": (packed >> 4 | packed << 4).reshape(-1, 1),
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(text, np.uint8),
        **nested,
    }


def _nested(absmax: np.ndarray) -> tuple[Tensors, dict[str, Any]]:
    """Return coded scales, and what the state says of them."""
    offset = float(absmax.mean())
    blocks = -(-len(absmax) // NESTED_BLOCK)
    padded = np.zeros(blocks * NESTED_BLOCK, np.float32)
    padded[: len(absmax)] = absmax - np.float32(offset)
    groups = padded.reshape(blocks, NESTED_BLOCK)
    largest = np.abs(groups).max(axis=1)
    inverse = np.divide(1, largest, out=np.zeros_like(largest), where=largest > 0)
    codes = nearest(dynamic_map(), groups * inverse[:, None]).reshape(-1)[: len(absmax)]
    tensors = {
        "weight.absmax": codes,
        "weight.nested_absmax": largest,
        "weight.nested_quant_map": dynamic_map(),
    }
    state = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    return tensors, state


def fp8(w: np.ndarray) -> Tensors:
    """Return a float32 matrix in e4m3 with a scale per block of 128 x 128."""
    rows, columns = (-(-size // FP8_BLOCK) for size in w.shape)
    scales = np.empty((rows, columns), np.float32)
    values = np.empty(w.shape, FLOAT8)
    for i in range(rows):
        band = w[i * FP8_BLOCK : (i + 1) * FP8_BLOCK]
        starts = np.arange(0, w.shape[1], FP8_BLOCK)
        largest = np.maximum.reduceat(np.abs(band).max(axis=0), starts)
        scales[i] = np.where(largest > 0, largest / _FP8_MAX, 1)
        wide = scales[i].repeat(FP8_BLOCK)[: w.shape[1]]
        values[i * FP8_BLOCK : (i + 1) * FP8_BLOCK] = (band / wide[None]).astype(FLOAT8)
    return {"weight": values, "weight_scale_inv": scales}


def int4(w: np.ndarray, group: int) -> Tensors:
    """Return a float32 matrix in symmetric int4 with a bfloat16 scale per group."""
    grouped = w.reshape(w.shape[0], -1, group)
    largest = np.abs(grouped).max(axis=2)
    scales = np.where(largest > 0, largest / _INT4_STEPS, 1).astype(BFLOAT16)
    steps = np.rint(grouped / scales.astype(np.float32)[..., None])
    codes = (np.clip(steps, -8, 7) + 8).astype(np.uint8).reshape(w.shape)
    return {
        "weight_packed": pack(codes).view(np.int32),
        "weight_scale": scales,
        "weight_shape": np.array(w.shape, np.int64),
    }


def bitsandbytes_section(kept: list[str]) -> dict[str, Any]:
    """Return quantization_config of NF4; `kept` are the paths of maps in 16 bits."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": kept,
    }


def fp8_section(kept: list[str]) -> dict[str, Any]:
    """Return quantization_config of FP8."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": kept,
    }


def int4_section(kept: list[str], group: int) -> dict[str, Any]:
    """Return quantization_config of int4."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    weights |= {"group_size": group, "dynamic": False, "actorder": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": kept,
        "kv_cache_scheme": None,
    }


_COLUMNS: Mapping[str, int] = {"nf4": NF4_BLOCK, "fp8": 16, "int4": INT4_GROUPS[-1]}
FORMATS = tuple(sorted(_COLUMNS))


def fits(format_name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a map [d_out, d_in] can be encoded; others stay in 16 bits."""
    # transformers divides a matrix evenly among its scales, and vLLM wants whole blocks in fused
    # maps: neither reads a part of an FP8 block beside whole ones.
    is_whole = all(size <= FP8_BLOCK or size % FP8_BLOCK == 0 for size in shape)
    return shape[1] % _COLUMNS[format_name] == 0 and (format_name != "fp8" or is_whole)


def needs(format_name: str) -> str:
    """Return what `fits` asks of a map, as the end of a sentence."""
    columns = f"columns in multiples of {_COLUMNS[format_name]}"
    if format_name != "fp8":
        return columns
    return f"{columns}, and rows and columns of at most {FP8_BLOCK} or in multiples of it"


def encoder(
    format_name: str, widths: set[int]
) -> tuple[Callable[[np.ndarray], Tensors], Callable[[list[str]], dict[str, Any]]]:
    """Return what encodes a matrix, and what makes the section of the config.

    `widths` are the numbers of columns of all maps that will be encoded.
    """
    if format_name == "nf4":
        return nf4, bitsandbytes_section
    if format_name == "fp8":
        return fp8, fp8_section
    group = next(g for g in INT4_GROUPS if not any(width % g for width in widths))
    return functools.partial(int4, group=group), functools.partial(int4_section, group=group)
