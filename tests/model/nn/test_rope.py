"""Rotary embeddings against transformers' own functions and against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.config import RopeConfig
from lora_jax.nn.rope import cos_sin, inverse_frequencies
from lora_jax.ops.rotary import rotate

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


def test_a_program_on_a_cpu_computes_every_cos_and_sin_once():
    """XLA put them into the fusion of each rotation: 6 of each here, for q and k of 3 layers."""

    @jax.jit
    def turned(x, positions):
        angles = cos_sin(CONFIGS["default"], positions)
        for _ in range(3):
            q, k = rotate(x, *angles), rotate(x[:, :1], *angles)
            x = jnp.tanh(q.reshape(8, 32) @ jnp.ones((32, 32))).reshape(8, 2, 16) + k
        return x

    x = jnp.ones((8, 2, 16), jnp.float32)
    compiled = str(turned.lower(x, jnp.arange(8)).compile().as_text())
    assert compiled.count(" cosine(") == compiled.count(" sine(") == 1
