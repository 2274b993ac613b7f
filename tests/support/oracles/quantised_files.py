"""Matrices as each quantisation library stores them, and the values that the library reads.

Written from the formats' descriptions, code by code, and not from the product's loaders.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NF4 = (
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 "
    "0.7229568362236023 1"
)
NF4_TABLE = np.array(NF4.split(), np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Stored:
    """Tensors of a map by what follows its path, and the float32 values [d_out, d_in]."""

    tensors: dict[str, np.ndarray]
    values: np.ndarray


def random_nf4(shape: tuple[int, int], rng, *, nested: bool = False, blocksize: int = 64) -> Stored:
    """Return a matrix of bitsandbytes: flat codes, the high half of a byte first."""
    d_out, d_in = shape
    codes = rng.integers(0, 16, d_out * d_in).astype(np.uint8)
    scales = (rng.random(d_out * d_in // blocksize) / d_in**0.5).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize, "shape": list(shape)}
    state["dtype"] = "bfloat16"
    tensors = {"weight": (codes[::2] << 4 | codes[1::2])[:, None]}
    if nested:
        table = np.sort(rng.standard_normal(256)).astype(np.float32) / 50
        absmax = rng.random(-(-len(scales) // 256)).astype(np.float32)
        coded = rng.integers(0, 256, len(scales)).astype(np.uint8)
        state |= {"nested_blocksize": 256, "nested_offset": 0.03, "nested_dtype": "float32"}
        tensors["weight.nested_absmax"], tensors["weight.nested_quant_map"] = absmax, table
        scales = table[coded] * absmax[np.arange(len(coded)) // 256] + np.float32(0.03)
        tensors["weight.absmax"] = coded
    else:
        tensors["weight.absmax"] = scales
    tensors["weight.quant_map"] = NF4_TABLE
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = text
    values = [NF4_TABLE[code] * scales[i // blocksize] for i, code in enumerate(codes)]
    return Stored(tensors, np.array(values, np.float32).reshape(shape))


def random_fp8(
    shape: tuple[int, int],
    rng,
    *,
    block: tuple[int, int] | None = None,
    scales: Any = "weight_scale",
) -> Stored:
    """Return a matrix of e4m3 values with a scale per block, or one for all."""
    codes = rng.integers(0, 127, shape).astype(np.uint8)
    codes |= (rng.integers(0, 2, shape) << 7).astype(np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn)
    rows, columns = block or shape
    grid = (-(-shape[0] // rows), -(-shape[1] // columns))
    factors = ((rng.random(grid) + 0.5) / 448 / shape[1] ** 0.5).astype(np.float32)
    wide = values.astype(np.float32)
    for i in range(shape[0]):
        for j in range(grid[1]):
            part = slice(j * columns, (j + 1) * columns)
            wide[i, part] = wide[i, part] * factors[i // rows, j]
    stored = factors if block else factors.reshape(())
    return Stored({"weight": values, scales: stored}, wide)


def random_int4(
    shape: tuple[int, int], rng, *, group: int, symmetric: bool = True, dtype: Any = BFLOAT16
) -> Stored:
    """Return a matrix of compressed-tensors' pack-quantized: value + 8 from the low bits up."""
    values = rng.integers(-8, 8, shape)
    scales, zeros = _scales_and_zeros(shape, group, rng, dtype)
    zeros = np.zeros_like(zeros) if symmetric else zeros - 8
    tensors = {
        "weight_packed": _numbers(values + 8, range(8)),
        "weight_scale": scales,
        "weight_shape": np.array(shape, np.int64),
    }
    if not symmetric:
        padded = np.concatenate([zeros + 8, np.zeros((-shape[0] % 8, zeros.shape[1]), int)])
        tensors["weight_zero_point"] = np.ascontiguousarray(_numbers(padded.T, range(8)).T)
    return Stored(tensors, _grouped(values, zeros, scales, group))


def random_gptq(
    shape: tuple[int, int], rng, *, group: int, symmetric: bool = True, offset: int = 1
) -> Stored:
    """Return a matrix of GPTQ: everything transposed, zero points less `offset`."""
    codes = rng.integers(0, 16, shape)
    scales, zeros = _scales_and_zeros(shape, group, rng, np.float16)
    zeros = np.full_like(zeros, 8) if symmetric else zeros
    tensors = {
        "qweight": np.ascontiguousarray(_numbers(codes, range(8)).T),
        "scales": np.ascontiguousarray(scales.T),
        "qzeros": _numbers(zeros.T - offset, range(8)),
        "g_idx": (np.arange(shape[1]) // group).astype(np.int32),
    }
    return Stored(tensors, _grouped(codes, zeros, scales, group))


def random_awq(shape: tuple[int, int], rng, *, group: int) -> Stored:
    """Return a matrix of AWQ: transposed, eight columns of a number out of order."""
    codes = rng.integers(0, 16, shape)
    scales, zeros = _scales_and_zeros(shape, group, rng, np.float16)
    tensors = {
        "qweight": _numbers(codes.T, AWQ_COLUMNS),
        "scales": np.ascontiguousarray(scales.T),
        "qzeros": _numbers(zeros.T, AWQ_COLUMNS),
    }
    return Stored(tensors, _grouped(codes, zeros, scales, group))


def random_mxfp4(shape: tuple[int, int], rng) -> Stored:
    """Return a matrix of compressed-tensors' MXFP4: the earlier value in the low half."""
    codes = rng.integers(0, 16, shape)
    exponents = rng.integers(118, 126, (shape[0], shape[1] // 32)).astype(np.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    signs = np.where(codes >= 8, -1, 1).astype(np.float32)
    values = signs * E2M1[codes & 7]
    values = values * np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, axis=1)
    return Stored({"weight_packed": packed, "weight_scale": exponents}, values.astype(np.float32))


def _scales_and_zeros(shape: tuple[int, int], group: int, rng, dtype: Any):
    grid = (shape[0], shape[1] // group)
    scales = ((rng.random(grid) + 0.5) / 8 / shape[1] ** 0.5).astype(dtype)
    return scales, rng.integers(1, 16, grid)


def _grouped(values: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """Return (value - zero) * scale in float32, each with its group's."""
    out = np.empty(values.shape, np.float32)
    for k in range(values.shape[1]):
        g = k // group
        difference = (values[:, k] - zeros[:, g]).astype(np.float32)
        out[:, k] = difference * scales[:, g].astype(np.float32)
    return out


def _numbers(codes: np.ndarray, order) -> np.ndarray:
    """Return int32 of eight codes of a row each: nibble i is column order[i]."""
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, column in enumerate(order):
        out |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return out.view(np.int32)


def compressed(kind: str, bits: int, form: str, **weights: Any) -> dict[str, Any]:
    """Return compressed-tensors' section of a config."""
    arguments = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    method = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return method | {"config_groups": groups}


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store matrices: what a config says, and what makes one of them."""

    section: dict[str, Any]
    make: Callable[..., Stored]
    options: dict[str, Any]


_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
_PACKED = "pack-quantized"
FORMATS = {
    "nf4": Format(_BITSANDBYTES, random_nf4, {}),
    "nf4 nested": Format(_BITSANDBYTES, random_nf4, {"nested": True}),
    "fp8 block": Format(
        _FP8 | {"weight_block_size": [128, 128]},
        random_fp8,
        {"block": (128, 128), "scales": "weight_scale_inv"},
    ),
    "fp8 tensor": Format(_FP8, random_fp8, {}),
    "fp8 channel": Format(
        compressed("float", 8, "float-quantized", strategy="channel"),
        lambda shape, rng: random_fp8(shape, rng, block=(1, shape[1])),
        {},
    ),
    "int4": Format(
        compressed("int", 4, _PACKED, strategy="group", group_size=32), random_int4, {"group": 32}
    ),
    "int4 zeros": Format(
        compressed("int", 4, _PACKED, strategy="group", group_size=64, symmetric=False),
        random_int4,
        {"group": 64, "symmetric": False},
    ),
    "gptq": Format(_GPTQ, random_gptq, {"group": 32}),
    "gptq zeros": Format(_GPTQ | {"sym": False}, random_gptq, {"group": 32, "symmetric": False}),
    "gptq v2": Format(
        _GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        random_gptq,
        {"group": 32, "symmetric": False, "offset": 0},
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 64}, random_awq, {"group": 64}),
    "mxfp4": Format(
        compressed("float", 4, "mxfp4-pack-quantized", strategy="group", group_size=32),
        random_mxfp4,
        {},
    ),
}


def store(name: str, shape: tuple[int, int], rng) -> Stored:
    """Return a random matrix in a format of FORMATS."""
    return FORMATS[name].make(shape, rng, **FORMATS[name].options)
