"""The transform against dynamic programming, with few and with many adapters of equal chance."""

import numpy as np
import pytest

from lora_jax.placement.poisson_binomial import admissible_miss, value_at


def exact(resident, popularity) -> np.ndarray:
    """G by one dynamic programme over (residents, popularity of the absent)."""
    chance, absent = np.zeros(len(resident) + 1), np.zeros(len(resident) + 1)
    chance[0] = 1.0
    for q, p in zip(resident, popularity, strict=True):
        step = absent * (1 - q) + p * (1 - q) * chance
        step[1:] += q * absent[:-1]
        chance[1:] = chance[1:] * (1 - q) + chance[:-1] * q
        chance[0] *= 1 - q
        absent = step
    return np.cumsum(absent)


def drawn(count: int, low: float, high: float) -> np.ndarray:
    return np.random.default_rng(3).uniform(low, high, count)


CASES = {
    "one": np.array([0.3]),
    "none resident": np.zeros(5),
    "all resident": np.ones(5),
    "certain and impossible": np.array([1.0, 1.0, 0.5, 0.0, 0.0, 0.0]),
    "halves": np.full(12, 0.5),
    "few": drawn(40, 0, 1),
    "many low": drawn(900, 0, 0.2),
    "many high": drawn(900, 0.8, 1),
    "many in the middle": drawn(900, 0.3, 0.7),
    "many everywhere": drawn(1500, 0, 1),
    "many almost impossible": drawn(900, 0, 1e-4),
    "many certain, some in the middle": np.concatenate([np.ones(400), drawn(150, 0.3, 0.7)]),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_dynamic_programming(name):
    resident = np.sort(CASES[name])[::-1]
    popularity = np.random.default_rng(4).dirichlet(np.ones(len(resident)))
    low, cumulative = admissible_miss(resident, popularity)
    got = [value_at(low, cumulative, count) for count in range(len(resident) + 1)]
    np.testing.assert_allclose(got, exact(resident, popularity), rtol=0, atol=1e-11)


def test_below_the_window_it_is_zero_and_beyond_it_constant():
    resident, popularity = np.full(3000, 0.5), np.full(3000, 1 / 3000)
    low, cumulative = admissible_miss(resident, popularity)
    assert 0 < low < 1500 < low + len(cumulative) < 3000
    assert value_at(low, cumulative, low - 1) == 0
    assert value_at(low, cumulative, 3000) == pytest.approx(0.5, abs=1e-12)
