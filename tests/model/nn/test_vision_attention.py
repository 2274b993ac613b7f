"""Attention in blocks against the plain formula; the bucket has no part in the bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.nn.vision_attention import attend, attend_windows

SCALE = 0.3


def draw(size: int, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(size), 3)
    return tuple(jax.random.normal(key, (size, 2, 6), dtype) for key in keys)


def plain(q, k, v, valid) -> np.ndarray:
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * SCALE
    scores = np.where(np.asarray(valid)[None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("count", [3, 256, 300])
def test_blocks_match_the_formula(count: int):
    q, k, v = draw(512)
    valid = (jnp.arange(512) < count) & (jnp.arange(512) % 7 != 2)
    got = np.asarray(attend(q, k, v, valid, jnp.int32(count), SCALE))
    want = plain(q[:count], k, v, valid)
    np.testing.assert_allclose(got[:count], want, atol=2e-6)


def test_a_larger_bucket_gives_the_same_bits():
    q, k, v = draw(300)
    valid = jnp.ones(300, bool)
    small = attend(q, k, v, valid, jnp.int32(300), SCALE)
    more = ((0, 300), (0, 0), (0, 0))
    nans = [jnp.pad(a, more, constant_values=jnp.nan) for a in (q, k)]
    wide = attend(*nans, jnp.pad(v, more), jnp.pad(valid, (0, 300)), jnp.int32(300), SCALE)
    np.testing.assert_array_equal(np.asarray(wide)[:300], np.asarray(small))


def test_windows_see_themselves_only_and_empty_ones_are_finite():
    q, k, v = draw(24)
    valid = jnp.arange(24) < 13
    got = np.asarray(attend_windows(q, k, v, valid, 8, SCALE))
    for start in (0, 8):
        part = slice(start, start + 8)
        want = plain(q[part], k[part], v[part], valid[part])
        np.testing.assert_allclose(got[part], want, atol=2e-6)
    assert np.isfinite(got).all()


def test_bfloat16_keeps_its_dtype():
    q, k, v = draw(16, jnp.bfloat16)
    got = attend(q, k, v, jnp.ones(16, bool), jnp.int32(16), SCALE)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), plain(q, k, v, np.ones(16)), atol=3e-2)


@pytest.mark.gpu
def test_cudnn_has_the_blocks_results_and_the_bucket_has_no_part_in_its_bits():
    keys = jax.random.split(jax.random.key(7), 3)
    q, k, v = (jax.random.normal(key, (2048, 16, 72), jnp.bfloat16) for key in keys)
    count, found = 800, []
    for size in (1024, 2048):
        valid = jnp.arange(size) < count
        args = (q[:size], k[:size], v[:size], valid, jnp.int32(count), 72**-0.5)
        found.append(np.asarray(attend(*args, leading=True)[:count], np.float32))
    blocks = np.asarray(attend(*args)[:count], np.float32)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], blocks, atol=4e-3)
