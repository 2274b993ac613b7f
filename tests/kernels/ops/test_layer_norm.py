"""The layer norm: its meaning, the same bits in every company, and a gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.layer_norm import layer_norm


def draw(rows: int, size: int, dtype: str, *, biased: bool):
    rng = np.random.default_rng(size)
    x = jnp.asarray(2 + rng.standard_normal((rows, size)), dtype)
    weight, bias = (jnp.asarray(rng.standard_normal(size), dtype) for _ in range(2))
    return x, weight, bias if biased else None


@pytest.mark.parametrize(("name", "size"), [("xla", 24), ("ffi", 24), ("ffi", 3), ("ffi", 1029)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_meaning_and_depends_on_no_other_row(dtype, biased, size, name):
    x, *rest = draw(9, size, dtype, biased=biased)
    got = layer_norm(x, *rest, 1e-5, name)
    want = layer_norm(x, *rest, 1e-5, "reference")
    wide = (np.asarray(a, np.float32) for a in (got, want))
    np.testing.assert_allclose(*wide, **TOLERANCE[dtype])
    np.testing.assert_array_equal(layer_norm(x[4:5], *rest, 1e-5, name)[0], got[4])


def test_on_a_cpu_it_is_one_kernel_where_dtypes_are_one():
    x, weight, bias = draw(4, 8, "bfloat16", biased=True)
    np.testing.assert_array_equal(
        layer_norm(x, weight, bias, 1e-5), layer_norm(x, weight, bias, 1e-5, "ffi")
    )
    with pytest.raises(
        NotImplementedError, match="all arrays in float32 or bfloat16, not bfloat16"
    ):
        layer_norm(x, weight.astype(jnp.float32), bias, 1e-5, "ffi")


@pytest.mark.parametrize("name", ["ffi", "xla"])
def test_gradient_is_that_of_the_formula(name):
    def loss(how):
        return lambda *given: jnp.sum(jnp.sin(layer_norm(*given, 1e-5, how)))

    given = draw(3, 8, "float32", biased=True)
    got, want = (jax.grad(loss(how), (0, 1, 2))(*given) for how in (name, "reference"))
    for mine, its in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
def test_on_a_gpu_the_kernel_matches_and_depends_on_no_other_row(biased):
    x, *rest = draw(33, 1152, "bfloat16", biased=biased)
    run = jax.jit(functools.partial(layer_norm, eps=1e-6, implementation="cuda"))
    got = np.asarray(run(x, *rest), np.float32)
    wide = (None if a is None else a.astype(jnp.float32) for a in (x, *rest))
    np.testing.assert_allclose(
        got, np.asarray(layer_norm(*wide, 1e-6, "reference")), rtol=4.1e-3, atol=1e-3
    )
    np.testing.assert_array_equal(np.asarray(run(x[7:8], *rest), np.float32)[0], got[7])


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_weight_of_another_width_is_named():
    x, wide = jnp.ones((3, 8)), jnp.ones(8)
    with pytest.raises(ValueError, match=r"layer_norm: weight has shape \(7,\), expected \(8,\)"):
        layer_norm(x, jnp.ones(7), None, 1e-5)
    with pytest.raises(ValueError, match=r"layer_norm: bias has shape \(9,\), expected \(8,\)"):
        layer_norm(x, wide, jnp.ones(9), 1e-5)
