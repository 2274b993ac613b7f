"""Rows in 8 bits: the nearest values, a scale each, and their bytes."""

import ml_dtypes
import numpy as np
import pytest

from lora_jax.rank_rows import (
    INT8,
    joined,
    parts,
    quantised,
    rows_nbytes,
    scaled,
    stored_width,
    value_width,
)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_each_value_is_within_half_a_step(dtype):
    rng = np.random.default_rng(0)
    matrix = (rng.standard_normal((3, 5, 30)) * 10.0 ** rng.integers(-3, 3, (3, 5, 1))).astype(
        dtype
    )
    rows = quantised(matrix)
    assert (rows.dtype, rows.shape) == (INT8, (3, 5, 46))
    values, scales = parts(rows)
    assert np.abs(values).max() == 127
    wide = matrix.astype(np.float32)
    error = np.abs(values * scales[..., None] - wide)
    assert (error <= 0.5001 * scales[..., None]).all()
    np.testing.assert_array_equal(joined(values, scales), rows)


def test_rows_of_zeros_stay_so():
    values, scales = parts(quantised(np.zeros((2, 3, 8), np.float32)))
    assert not values.any()
    assert not scales.any()


def test_rows_below_the_normal_numbers_keep_their_signs():
    values, _ = parts(quantised(np.array([[2e-43, -2e-43]], np.float32)))
    assert values.tolist() == [[127, -127]]


def test_factors_change_the_scales_alone():
    matrix = np.random.default_rng(1).standard_normal((2, 3, 8)).astype(np.float32)
    rows = quantised(matrix)
    values, scales = parts(scaled(rows, 0.5, -4.0))
    np.testing.assert_array_equal(values, parts(rows)[0])
    np.testing.assert_array_equal(scales, parts(rows)[1] * -2)
    np.testing.assert_array_equal(scaled(matrix, 0.5, -4.0), matrix * -2)


def test_bytes_and_items_of_a_row():
    assert (stored_width(64, INT8), value_width(80, INT8)) == (80, 64)
    assert stored_width(64, np.dtype(np.float32)) == value_width(64, np.dtype(np.float32)) == 64
    assert rows_nbytes({64: 2, 128: 1}, 1) == 2 * 80 + 144
    assert rows_nbytes({64: 2, 128: 1}, 2) == 4 * 128
