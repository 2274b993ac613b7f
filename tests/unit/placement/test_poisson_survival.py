"""Tails of the Poisson distribution against scipy."""

import itertools

import numpy as np
import pytest
from scipy.special import gammainc

from lora_jax.placement.poisson_survival import survival_rows


@pytest.mark.parametrize(
    "means",
    [
        [3.0],
        [0.0, 0.0],
        [500.0, 80.0, 9.0, 1.0, 0.1, 1e-6, 1e-18, 0.0],
        [20_000.0, 19_000.0, 5_000.0, 2.0],
    ],
)
def test_rows_are_right_to_twelve_digits(means):
    means = np.array(means)
    for threshold, row in enumerate(itertools.islice(survival_rows(means), 700)):
        np.testing.assert_allclose(row, gammainc(threshold + 1, means), rtol=0, atol=1e-12)


def test_far_thresholds_stay_right():
    means = np.array([20_000.0, 19_000.0, 100.0])
    for threshold, row in enumerate(itertools.islice(survival_rows(means), 19_000, 19_300), 19_000):
        np.testing.assert_allclose(row, gammainc(threshold + 1, means), rtol=0, atol=1e-11)
