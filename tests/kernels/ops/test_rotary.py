"""Rotation of heads: a complex product, the same bits in every company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.config import RopeConfig
from lora_jax.nn.rope import cos_sin
from lora_jax.ops.rotary import rotate


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
    config = RopeConfig("yarn", 32, 1e4, 4.0, original_max_positions=2048, magnitude=1.138629436)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4, 32)).astype(np.float32)
    positions = rng.integers(0, 5000, 64).astype(np.int32)
    step = jax.jit(lambda p, v: rotate(v, *cos_sin(config, p), interleaved=interleaved))
    whole = np.asarray(step(positions, x))
    for rows in (1, 2, 8, 32):
        parts = [step(positions[s : s + rows], x[s : s + rows]) for s in range(0, 64, rows)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
