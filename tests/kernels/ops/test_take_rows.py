"""Rows by index: what the result holds, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from cuda_backend import take_rows as kernel
from lora_jax.ops.take_rows import take_rows


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_up_to_their_number_are_those_of_the_index(dtype, implementation):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), dtype)
    order = jnp.asarray([3, 0, 3, 4, 1], jnp.int32)
    got = take_rows(x, order, jnp.int32(4), implementation=implementation)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got)[:4], np.asarray(x)[np.asarray(order)[:4]])


def test_another_dtype_is_refused_by_name():
    x = jnp.zeros((4, 4), jnp.float16)
    with pytest.raises(ValueError, match=r"take_rows: .*x float16"):
        take_rows(x, jnp.zeros(3, jnp.int32), jnp.int32(1))


def test_rows_that_are_no_whole_units_are_declined():
    with pytest.raises(NotImplementedError, match="units of 16 bytes, not 6 x bfloat16"):
        kernel.take_rows(jnp.zeros((2, 6), jnp.bfloat16), jnp.zeros(3, jnp.int32), jnp.int32(3))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "real", "width"), [(9, 7, 8), (32768, 16401, 2048), (40, 40, 776)]
)
def test_the_kernel_takes_the_same_rows(rows, real, width):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, width)), "bfloat16")
    order = rng.integers(0, 64, rows, np.int32)
    got = kernel.take_rows(x, jnp.asarray(order), jnp.int32(real))
    np.testing.assert_array_equal(np.asarray(got)[:real], np.asarray(x)[order[:real]])
