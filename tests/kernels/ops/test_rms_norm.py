"""The RMS norm: its meaning, the same bits in every company, and a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.rms_norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("implementation", ["xla", "ffi"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("added", [False, True])
def test_a_norm_is_the_meaning_and_depends_on_no_other_row(implementation, dtype, added):
    """Rows of 27 are no whole number of vectors; 9 are more than a piece of the C++ kernel has."""
    rng = np.random.default_rng(0)
    x, addend = (jnp.asarray(rng.standard_normal((9, 27)), dtype) for _ in range(2))
    weight = jnp.asarray(rng.standard_normal(27), dtype)
    given = (x, addend if added else None)

    def run(x, addend, implementation):
        return add_rms_norm(x, addend, weight, 1e-5, implementation=implementation)

    total, got = run(*given, implementation)
    for mine, its in zip((total, got), run(*given, "reference"), strict=True):
        wide = (np.asarray(a, np.float32) for a in (mine, its))
        np.testing.assert_allclose(*wide, **TOLERANCE[dtype])
    for row in (4, 8):
        one = slice(row, row + 1)
        alone = run(x[one], addend[one] if added else None, implementation)
        for mine, its in zip(alone, (total, got), strict=True):
            np.testing.assert_array_equal(mine[0], its[row])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_rows_cost_nothing_on_a_cpu(dtype):
    rng = np.random.default_rng(3)
    x, addend = (jnp.asarray(rng.standard_normal((9, 27)), dtype) for _ in range(2))
    weight, options = jnp.ones(27, dtype), {"implementation": "ffi"}
    want = add_rms_norm(x, addend, weight, 1e-5, **options)
    got = add_rms_norm(x, addend, weight, 1e-5, num_rows=jnp.int32(4), **options)
    for mine, its in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine[:4], its[:4])
        np.testing.assert_array_equal(np.asarray(mine, np.float32)[4:], 0)


def test_the_sum_is_rounded_before_its_norm_on_a_cpu():
    """XLA leaves the rounding to bfloat16 out inside of a program, and has other bits there."""
    rng = np.random.default_rng(2)
    x, addend = (jnp.asarray(rng.standard_normal((4, 64)), "bfloat16") for _ in range(2))
    weight = jnp.ones(64, jnp.bfloat16)
    total, got = jax.jit(lambda x, y: add_rms_norm(x, y, weight, 1e-5))(x, addend)
    again = add_rms_norm(x + addend, None, weight, 1e-5, implementation="ffi")[1]
    np.testing.assert_array_equal(total, x + addend)
    np.testing.assert_array_equal(got, again)


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


@pytest.mark.usefixtures("shapes_unchecked")
def test_shapes_that_do_not_fit_are_named():
    x = jnp.ones((3, 8))
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(7,\), expected \(8,\)"):
        rms_norm(x, jnp.ones(7), 1e-5)
    with pytest.raises(ValueError, match=r"rms_norm: addend has shape \(2, 8\), expected \(3, 8\)"):
        add_rms_norm(x, jnp.ones((2, 8)), jnp.ones(8), 1e-5)
