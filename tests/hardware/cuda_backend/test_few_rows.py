"""Products for few rows on Hopper: the bits of Mosaic's kernel in every format, in any company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.quantised_model import FORMATS
from cuda_backend import few_rows
from lora_jax.ops.grouped_matmul import gated_matmul, grouped_matmul

pytestmark = pytest.mark.gpu
GROUPS, D_OUT, D_IN = 16, 768, 2048
SIZES = np.array([0, 3, 9, 17, 1, 0, 0, 40, 2, 0, 5, 8, 16, 0, 1, 4], np.int32)
ROWS = int(SIZES.sum()) + 6
NAMES = ("bfloat16", *FORMATS)


def weights(name: str, seed: int):
    w = jax.random.normal(jax.random.key(seed), (GROUPS, D_OUT, D_IN), jnp.bfloat16) * D_IN**-0.5
    return jax.jit(FORMATS.get(name, lambda w: w))(w)


def rows(seed: int, width: int = D_IN, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), (ROWS, width), dtype)


def same_bits(got, want):
    got, want = (np.asarray(a).view(np.int16) for a in (got, want))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("addend", [None, jnp.bfloat16, jnp.float32])
def test_product_has_the_bits_of_mosaics(name, addend):
    added = None if addend is None else rows(4, D_OUT, addend)
    args = (rows(0), weights(name, 1), jnp.asarray(SIZES), None, added)
    same_bits(*(grouped_matmul(*args, implementation=i) for i in ("cuda", "pallas_gpu")))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("added", [False, True])
def test_gated_product_has_the_bits_of_mosaics(name, added):
    addends = (rows(4, D_OUT), rows(5, D_OUT)) if added else ()
    args = (rows(0), weights(name, 1), weights(name, 2), jnp.asarray(SIZES), *addends)
    same_bits(*(gated_matmul(*args, implementation=i) for i in ("cuda", "pallas_gpu")))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_any_company(name):
    x, w = rows(0), weights(name, 1)
    whole = grouped_matmul(x, w, jnp.asarray(SIZES), implementation="cuda")
    starts = np.cumsum(SIZES) - SIZES
    for group in (1, 7, 15):
        row = int(starts[group] + SIZES[group] - 1)
        alone = grouped_matmul(
            x[row : row + 1], w[group : group + 1], jnp.array([1], jnp.int32), implementation="cuda"
        )
        same_bits(alone[0], whole[row])
    assert not np.asarray(whole[SIZES.sum() :], np.float32).any()


def test_bias_and_a_hidden_size_that_no_stage_divides():
    """GPT-OSS's: 2880, scales of 32 in 4 bits."""
    w = jax.random.normal(jax.random.key(1), (GROUPS, 2880, 2880), jnp.bfloat16) / 54
    bias, x = jax.random.normal(jax.random.key(2), (GROUPS, 2880), jnp.bfloat16), rows(3, 2880)
    for name in ("bfloat16", "mxfp4"):
        args = (x, jax.jit(FORMATS.get(name, lambda w: w))(w), jnp.asarray(SIZES), bias)
        same_bits(*(grouped_matmul(*args, implementation=i) for i in ("cuda", "pallas_gpu")))


def test_few_rows_are_the_cuda_kernels_and_prompts_mosaics():
    few_rows.check_support(few_rows.form_of((weights("fp8", 1),)), 512, 128, 768, 2048, 128)
    with pytest.raises(NotImplementedError, match="up to 16 rows"):
        few_rows.check_support(few_rows.form_of((weights("fp8", 1),)), 8192, 128, 768, 2048, 128)
