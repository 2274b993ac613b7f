"""Rotary embeddings against transformers' own functions and against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.config import RopeConfig
from lora_jax.nn.rope import cos_sin, inverse_frequencies, rotate

CONFIGS = {
    "default": RopeConfig("default", 16, 1e4),
    "linear": RopeConfig("linear", 16, 1e4, factor=4.0),
    "llama3": RopeConfig("llama3", 64, 5e5, 8.0, original_max_positions=8192, high_freq_factor=4.0),
    "yarn": RopeConfig("yarn", 64, 1e4, 4.0, original_max_positions=2048, magnitude=1.138629436),
    "yarn, not truncated": RopeConfig(
        "yarn", 64, 1.5e5, 32.0, original_max_positions=4096, truncate=False, magnitude=1.3465735
    ),
    "yarn with one turn": RopeConfig(
        "yarn", 8, 1e4, 2.0, original_max_positions=4, magnitude=1.069314718
    ),
}


def as_transformers(config: RopeConfig):
    """Return what transformers computes: inverse frequencies and the factor of cos and sin."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spelled = {
        "rope_type": config.kind,
        "rope_theta": config.theta,
        "factor": config.factor,
        "original_max_position_embeddings": config.original_max_positions,
        "low_freq_factor": config.low_freq_factor,
        "high_freq_factor": config.high_freq_factor,
        "truncate": config.truncate,
    }
    known = transformers.LlamaConfig(
        hidden_size=config.dim, num_attention_heads=1, rope_parameters=dict(spelled)
    )
    if config.kind == "default":
        return 1 / config.theta ** (np.arange(0, config.dim, 2) / config.dim), 1.0
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[config.kind](known, "cpu")
    return frequencies.numpy(), magnitude


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_those_of_transformers(name):
    frequencies, magnitude = as_transformers(CONFIGS[name])
    np.testing.assert_allclose(inverse_frequencies(CONFIGS[name]), frequencies, rtol=1e-6)
    assert CONFIGS[name].magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("name", CONFIGS)
def test_cos_and_sin_at_far_positions(name):
    config = CONFIGS[name]
    positions = np.array([0, 1, 17, 4095, 131071], np.int32)
    # The angle itself is a float32 product, whose rounding counts at far positions.
    angles = (positions.astype(np.float32)[:, None] * inverse_frequencies(config)).astype(float)
    cos, sin = cos_sin(config, jnp.asarray(positions))
    np.testing.assert_allclose(cos, config.magnitude * np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, config.magnitude * np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 3, 8)).astype(np.float32)
    angles = rng.standard_normal((6, 4)).astype(np.float32)
    pairs = x.reshape(6, 3, 4, 2) if interleaved else np.stack(np.split(x, 2, -1), -1)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
    both = np.stack([turned.real, turned.imag], -1)
    want = (
        both.reshape(x.shape) if interleaved else np.concatenate([both[..., 0], both[..., 1]], -1)
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    got = rotate(jnp.asarray(x), cos, sin, interleaved=interleaved)
    np.testing.assert_allclose(got, want, atol=1e-6)
    rounded = rotate(jnp.asarray(x, jnp.bfloat16), cos, sin, interleaved=interleaved)
    assert rounded.dtype == jnp.bfloat16


@pytest.mark.parametrize("interleaved", [False, True])
def test_bits_do_not_depend_on_the_number_of_tokens(interleaved):
    config = dataclasses.replace(CONFIGS["yarn"], dim=32)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4, 32)).astype(np.float32)
    positions = rng.integers(0, 5000, 64).astype(np.int32)
    step = jax.jit(lambda p, v: rotate(v, *cos_sin(config, p), interleaved=interleaved))
    whole = np.asarray(step(positions, x))
    for rows in (1, 2, 8, 32):
        parts = [step(positions[s : s + rows], x[s : s + rows]) for s in range(0, 64, rows)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
