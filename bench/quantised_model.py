"""Quantised forms of a model's random weights, made on the device: speed, not quality, is measured.

What checkpoints leave in 16 bits stays so: embeddings, head, norms and the experts' router.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.models.quantised.forms import E2M1, NF4, SIGNED, UNSIGNED
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.ops.grouped_matmul import CodedWeight, ScaledWeight, Weight
from lora_jax.ops.grouped_matmul.orders import for_kernels
from lora_jax.typing import Array

KEPT = ("lm_head", "router")  # in the names of linear maps that stay plain
BLOCK = 128


def _fp8(w: Array) -> Weight:
    """Return e4m3 values with a scale for each run of a row."""
    block = math.gcd(BLOCK, w.shape[-1])
    by_block = w.reshape(*w.shape[:-1], -1, block).astype(jnp.float32)
    scales = jnp.max(jnp.abs(by_block), axis=-1) / 448
    values = (by_block / scales[..., None]).astype(jnp.float8_e4m3fn).reshape(w.shape)
    return ScaledWeight(values, scales, (1, block), jnp.dtype(w.dtype))


def _coded(w: Array, table: tuple[float, ...], group: int, narrow: bool) -> CodedWeight:
    """Return codes of the nearest values, the largest weight of a group being the largest value."""
    group = math.gcd(group, w.shape[-1])
    by_group = w.reshape(*w.shape[:-1], -1, group).astype(jnp.float32)
    scales = jnp.max(jnp.abs(by_group), axis=-1) / max(table)
    scales = scales.astype(jnp.bfloat16) if narrow else scales
    steps = by_group / scales[..., None].astype(jnp.float32)
    ordered = sorted(range(16), key=lambda code: table[code])
    code = jnp.full(steps.shape, ordered[0], jnp.uint8)
    for low, high in itertools.pairwise(ordered):
        code = jnp.where(steps > (table[low] + table[high]) / 2, jnp.uint8(high), code)
    flat = code.reshape(*w.shape[:-1], -1, 2)
    codes = flat[..., 0] | flat[..., 1] << 4
    return CodedWeight(codes, scales, None, table, jnp.dtype(w.dtype))


def _gptq(w: Array) -> CodedWeight:
    """Return int4 codes whose scales are float16's in float32, as GPTQ's files have them."""
    coded = _coded(w, SIGNED, 128, narrow=True)
    last_bit = 1 + 2.0**-10  # of a float16, which no bfloat16 has
    scales = coded.scales.astype(jnp.float32) * last_bit
    # XLA drops a conversion to float16 and back.
    scales = jax.lax.reduce_precision(scales, exponent_bits=5, mantissa_bits=10)
    return dataclasses.replace(coded, scales=scales)


def _awq(w: Array) -> CodedWeight:
    """Return the same with zero points 7 to 9, as AWQ's files have them: other weights."""
    coded = _gptq(w)
    bits = jax.lax.bitcast_convert_type(coded.scales, jnp.uint32)
    zeros = (7 + (bits >> 13) % 3).astype(jnp.uint8)
    return dataclasses.replace(coded, zeros=zeros, table=UNSIGNED)


FORMATS: dict[str, Callable[[Array], Weight]] = {
    "fp8": _fp8,
    "int4": functools.partial(_coded, table=SIGNED, group=128, narrow=True),
    "nf4": functools.partial(_coded, table=NF4, group=64, narrow=False),
    "mxfp4": functools.partial(_coded, table=E2M1, group=32, narrow=True),
    "gptq": _gptq,
    "awq": _awq,
}


def quantised(model: AbstractCausalLM, name: str) -> AbstractCausalLM:
    """Return the model with linear maps in a format, one after the other: plain ones are freed."""
    graphdef, state = nnx.split(model)
    make, flat = jax.jit(FORMATS[name], donate_argnums=0), nnx.to_flat_state(state)
    del model, state
    made = []
    for path, param in list(flat):
        kept = any(word in str(part) for part in path for word in KEPT)
        if param.get_metadata().get("coded") and not kept:
            made_one = for_kernels(jax.block_until_ready(make(param.get_value())))
            param = param.replace(made_one)
        made.append((path, param))
    return nnx.merge(graphdef, nnx.from_flat_state(made))
