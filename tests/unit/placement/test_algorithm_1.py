"""Algorithm 1 against its definition, and the equations against simulated access counts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammainc
from support.cases.placement_cases import enumerated_rate, popularities, rate_by_sums, zipf
from support.oracles.algorithm_1 import (
    admission_threshold,
    exceeds,
    free_slot_probability,
    immediate_admission_rate,
    minimum_capacity,
    residencies,
)


@pytest.mark.parametrize("mean", [0.0, 1e-9, 0.3, 4.0, 60.0])
@pytest.mark.parametrize("tau", [0, 1, 5, 70])
def test_whole_thresholds_are_eq_2(tau, mean):
    assert exceeds(float(tau), mean) == pytest.approx(gammainc(tau + 1, mean), abs=1e-13)


def test_between_whole_thresholds_it_is_the_chance_of_a_drawn_one():
    want = 0.75 * gammainc(3, 2.5) + 0.25 * gammainc(4, 2.5)
    assert exceeds(2.25, 2.5) == pytest.approx(want, abs=1e-14)


@settings(max_examples=20, deadline=None)
@given(p=popularities(5), batch=st.floats(0.01, 40))
def test_eq_3_holds_or_tau_is_zero(p, batch):
    accesses = (batch * p).tolist()
    for capacity in range(1, len(p) + 1):
        tau, total = admission_threshold(accesses, capacity), residencies(accesses, capacity).sum()
        assert tau >= 0
        if tau > 0:
            assert total == pytest.approx(capacity, abs=1e-9)
        else:
            assert total <= capacity + 1e-9


@settings(max_examples=30, deadline=None)
@given(p=popularities(5), chances=st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_eq_4_is_the_sum_over_all_sets_of_residents(p, chances):
    resident = np.array(chances[: len(p)])
    for capacity in range(1, len(p) + 1):
        got = immediate_admission_rate(p.tolist(), resident, capacity)
        assert got == pytest.approx(enumerated_rate(p, resident, capacity), abs=1e-12)
        assert got == pytest.approx(rate_by_sums(p, resident, capacity), abs=1e-12)


def test_a_free_slot_is_one_that_the_others_leave():
    """Two others of chance 1/2 and one slot: both must be absent. Line 16 stops at M - 1."""
    resident = np.array([0.9, 0.5, 0.5])
    assert free_slot_probability(resident, 0, 1) == pytest.approx(0.25)
    assert free_slot_probability(resident, 0, 2) == pytest.approx(0.75)
    assert free_slot_probability(resident, 0, 3) == 1.0


@settings(max_examples=10, deadline=None)
@given(p=popularities(5), batch=st.floats(0.1, 20), target=st.floats(0.05, 1))
def test_minimum_capacity_is_the_first_that_meets_the_target(p, batch, target):
    got = minimum_capacity(p.tolist(), batch, target)
    accesses = (batch * p).tolist()
    rates = [enumerated_rate(p, residencies(accesses, m), m) for m in range(1, len(p) + 1)]
    assert all(rate < target + 1e-9 for rate in rates[: got - 1])
    assert rates[got - 1] >= target - 1e-9


def simulate(p, batch: float, capacity: int, draws: int) -> tuple[float, float]:
    """Rate of immediate admissions over drawn access counts, and how far off it may be.

    The model as section 4.2.1 states it: Poisson counts, resident above tau (which, between whole
    numbers, is drawn), a request for adapter i, one free slot at least if it is absent. The bound
    is Maurer and Pontil's empirical Bernstein bound, exceeded with a chance below 1e-6.
    """
    rng = np.random.default_rng(7)
    tau = admission_threshold((batch * p).tolist(), capacity)
    whole = math.floor(tau)
    admitted = np.empty(draws)
    for start in range(0, draws, 10_000):
        part = slice(start, start + 10_000)
        counts = rng.poisson(batch * p, (len(admitted[part]), len(p)))
        resident = counts > whole + (rng.random(counts.shape) < tau - whole)
        others = resident.sum(axis=1, keepdims=True) - resident
        admitted[part] = (resident | (others <= capacity - 1)) @ p
    log = math.log(4 / 1e-6)
    bound = math.sqrt(2 * admitted.var() * log / draws) + 7 * log / (3 * (draws - 1))
    return float(admitted.mean()), bound


@pytest.mark.parametrize(
    ("adapters", "exponent", "batch", "capacity"),
    [
        (24, 1.2, 3.0, 1),
        (24, 1.2, 20.0, 6),
        (24, 1.2, 20.0, 14),  # tau is 0
        (24, 0.2, 60.0, 12),
        (6, 1.2, 300.0, 3),
    ],
)
def test_monte_carlo(adapters, exponent, batch, capacity):
    p = zipf(adapters, exponent)
    resident = residencies((batch * p).tolist(), capacity)
    seen, bound = simulate(p, batch, capacity, 100_000)
    assert bound < 0.01
    assert abs(seen - rate_by_sums(p, resident, capacity)) < bound


def test_incomplete_gamma_thresholds_do_not_match_counts():
    """Reading fractional tau as the regularised incomplete gamma function misses the counts."""
    p, batch, capacity = zipf(40, 0.5), 30.0, 14
    low, high = 0.0, 50.0
    for _ in range(100):
        tau = (low + high) / 2
        low, high = (tau, high) if gammainc(tau + 1, batch * p).sum() > capacity else (low, tau)
    gamma_rate = rate_by_sums(p, gammainc(low + 1, batch * p), capacity)
    seen, bound = simulate(p, batch, capacity, 200_000)
    assert bound < abs(seen - gamma_rate) < 0.01
    ours = rate_by_sums(p, residencies((batch * p).tolist(), capacity), capacity)
    assert abs(seen - ours) < bound


@pytest.mark.parametrize("batch", [200.0, 800.0, 1600.0])
def test_a_tau_below_zero_cannot_give_the_papers_100_percent(batch):
    """Section 6.3.2: 100.0% at 256 slots of 512 adapters; see the module's docstring."""
    p, capacity = zipf(512, 1.2), 256
    asked_for = 1 - np.exp(-batch * p)
    assert asked_for.sum() < capacity
    weight = (512 - capacity) / (512 - asked_for.sum())  # between tau = -1, all resident, and 0
    below_zero = rate_by_sums(p, 1 - weight + weight * asked_for, capacity)
    assert below_zero < 0.97
    assert rate_by_sums(p, asked_for, capacity) > 0.98
