"""Paged attention in Mosaic GPU: interpreted on a CPU, lowered for CUDA, and run where there is one.

On a GPU: JAX_PLATFORMS=cuda PYTHONPATH=src:tests:. python3 -m pytest --noconftest -m gpu FILE
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic import interpreted
from tolerance import TOLERANCE

from lora_jax.ops.cases import MODELS, AttentionCase, ModelShape, attention_case
from lora_jax.ops.paged_attention import pallas_gpu, reference
from lora_jax.ops.paged_attention._gpu_plan import Config, Sizes, find_config, make_plan

# (sequence, first position, tokens): decode, a chunk in the middle, one token, and one that sees
# the second chunk of positions.
MIXED = ((2, 30, 1), (1, 9, 5), (3, 0, 1), (4, 140, 1))
SHAPES = {
    "gqa": dataclasses.replace(MODELS["llama-8b"], q_heads=8, kv_heads=2, k_dim=64, v_dim=64),
    "window-and-sinks": dataclasses.replace(
        MODELS["gpt-oss-20b"], q_heads=8, kv_heads=1, sliding_window=70
    ),
    "latent": dataclasses.replace(MODELS["deepseek-v2-lite"], q_heads=16, k_dim=192, v_dim=128),
}
CUT = Config(block=64, chunk=64, tokens=1, cut=True, stages=2, ctas=1)
WHOLE = Config(block=64, chunk=64, tokens=2, cut=False, stages=3, ctas=1)


def as_numbers(array: jax.Array) -> np.ndarray:
    """Return bfloat16 as float32, which is exact."""
    return np.asarray(array.astype(jnp.float32))


def meaning(case: AttentionCase) -> np.ndarray:
    rest = (case.options["scale"], case.v_dim, case.sliding_window)
    of = jax.jit(reference.paged_attention, static_argnums=(8, 9, 10))
    return as_numbers(of(*case.arrays, case.sinks, *rest))


@functools.cache
def interpreted_kernel(v_dim: int, sliding_window: int | None, scale: float, **options):
    """Return the op, compiled once for each shape: that takes longer than running it."""
    options |= {"v_dim": v_dim, "sliding_window": sliding_window, "scale": scale}
    call = jax.jit(functools.partial(pallas_gpu.paged_attention, **options))
    return lambda *arrays: as_numbers(jax.block_until_ready(call(*arrays)))


def interpret(case: AttentionCase, config: Config, params: plgpu.InterpretGPUParams) -> np.ndarray:
    options = case.options
    sinks = options.pop("sinks")
    return interpreted_kernel(**options, config=config, interpret=params)(*case.arrays, sinks)


def tokens_of(case: AttentionCase, tokens: np.ndarray) -> AttentionCase:
    """Return the case with only these tokens, in this order, and as many slots for tokens."""
    room = len(case.q) - len(tokens)
    at = np.concatenate([tokens, np.zeros(room, int)])
    return dataclasses.replace(
        case,
        q=case.q[at],
        token_to_seq=case.token_to_seq[at],
        positions=case.positions[at],
        num_tokens=jnp.int32(len(tokens)),
    )


@pytest.mark.parametrize("config", [CUT, WHOLE], ids=["cut", "whole"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_interpreted_matches_the_reference(shape: ModelShape, config: Config):
    case = attention_case(shape, MIXED, page_size=16, dtype="bfloat16", padding=2)
    with interpreted() as params:
        got = interpret(case, config, params)
    np.testing.assert_allclose(got, meaning(case), **TOLERANCE["bfloat16"])
    assert not got[int(case.num_tokens) :].any()
