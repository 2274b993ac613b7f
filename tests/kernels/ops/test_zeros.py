"""Zeros that tie in a sort and keep their derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.zeros import unsigned_zeros

VALUES = [-np.inf, -1.5, -0.0, 0.0, 1e-30, np.inf, np.nan]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_the_sign_of_zeros_changes(dtype):
    values = jnp.asarray(VALUES, dtype)
    got = jax.jit(unsigned_zeros)(values)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), values.astype(jnp.float32))
    assert np.signbit(got).tolist()[:6] == [True, True, False, False, False, False]


def test_the_derivative_is_one_at_every_value():
    values = jnp.asarray(VALUES[1:5], jnp.float32)
    slopes = jax.vmap(jax.grad(unsigned_zeros))(values)
    np.testing.assert_array_equal(slopes, 1.0)
