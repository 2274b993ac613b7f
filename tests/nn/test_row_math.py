"""Row sums have the same bits in every company, and a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.nn.row_math import rms_norm, row_sum


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
def test_bits_do_not_depend_on_the_number_of_rows(size):
    x = np.random.default_rng(0).standard_normal((64, size)).astype(np.float32)
    step = jax.jit(row_sum)
    whole = np.asarray(step(x))
    np.testing.assert_allclose(whole[:, 0], x.astype(np.float64).sum(1), atol=1e-4)
    for rows in (1, 2, 16):
        parts = [step(x[start : start + rows]) for start in range(0, 64, rows)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_leading_axes():
    x = jnp.arange(24, dtype=jnp.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(row_sum(x), np.asarray(x).sum(-1, keepdims=True))


def test_gradient():
    x = jnp.asarray([[1.0, 2.0, 3.0]])
    gradient = jax.grad(lambda v: (row_sum(v) ** 2)[0, 0])(x)
    np.testing.assert_array_equal(gradient, [[12.0, 12.0, 12.0]])


def test_gradient_of_a_norm_is_that_of_its_formula():
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(rng.standard_normal((3, 8))), jnp.asarray(rng.standard_normal(8))

    def plain(x, weight):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * weight[None]

    def loss(norm):
        return lambda x, weight: jnp.sum(jnp.sin(norm(x, weight)))

    got = jax.grad(loss(lambda x, weight: rms_norm(x, weight, 1e-5)), (0, 1))(x, weight)
    want = jax.grad(loss(plain), (0, 1))(x, weight)
    for mine, its in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
