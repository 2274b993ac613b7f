"""Row sums have the same bits in every company, and a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.row_sum import row_sum, scale_last_axis


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


def test_the_last_axis_is_scaled_in_the_dtype_of_x():
    x = jnp.ones((2, 3, 4), jnp.bfloat16)
    scaled = scale_last_axis(x, jnp.arange(4, dtype=jnp.float32))
    assert scaled.dtype == jnp.bfloat16
    np.testing.assert_array_equal(scaled[1, 2].astype(jnp.float32), [0, 1, 2, 3])
