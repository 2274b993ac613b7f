"""The fast curve against Algorithm 1, its properties, and how long it takes."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammainc
from support.cases.placement_cases import popularities, rate_by_sums, zipf
from support.oracles import algorithm_1

from lora_jax.placement.provision import (
    Workload,
    admission_curve,
    first_capacity,
    minimum_capacity,
    of_batch,
    of_rates,
)

BATCHES = st.floats(-3, 1.7).map(lambda power: 10.0**power)


@settings(max_examples=25, deadline=None)
@given(p=popularities(5), batch=BATCHES)
def test_equals_algorithm_1_for_every_capacity(p, batch):
    workload = of_batch(p.tolist(), batch)
    want = [
        algorithm_1.immediate_admission_rate(
            workload.popularity, algorithm_1.residencies(workload.accesses, capacity), capacity
        )
        for capacity in range(1, len(p) + 1)
    ]
    np.testing.assert_allclose(admission_curve(workload), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("exponent", "batch"), [(1.2, 30.0), (1.2, 400.0), (0.1, 90.0)])
def test_equals_algorithm_1_with_more_adapters(exponent, batch):
    workload = of_batch(zipf(40, exponent).tolist(), batch)
    curve = admission_curve(workload)
    for capacity in (1, 20, 40):
        resident = algorithm_1.residencies(workload.accesses, capacity)
        want = algorithm_1.immediate_admission_rate(workload.popularity, resident, capacity)
        assert curve[capacity - 1] == pytest.approx(want, abs=1e-9)


def residents(accesses: np.ndarray, capacity: int) -> np.ndarray:
    """q_i of Eq. 2 at the tau of Eq. 3, by bisection over scipy's tails."""

    def at(tau: float) -> np.ndarray:
        whole = int(tau)
        tails = gammainc(whole + 1, accesses), gammainc(whole + 2, accesses)
        return tails[0] + (tau - whole) * (tails[1] - tails[0])

    low, high = 0.0, 2 * accesses.max() + 50
    if at(0.0).sum() <= capacity:
        return at(0.0)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).sum() > capacity else (low, middle)
    return at(high)


@pytest.mark.parametrize(
    ("adapters", "exponent", "batch", "capacities"),
    [
        (512, 1.2, 512.0, (1, 64, 131, 300)),
        (512, 0.3, 4096.0, (2, 300, 500, 512)),
        pytest.param(10_000, 1.2, 3000.0, (40, 700), marks=pytest.mark.long),
    ],
)
def test_equals_exact_sums_with_many_adapters(adapters, exponent, batch, capacities):
    p = zipf(adapters, exponent)
    curve = admission_curve(of_batch(p.tolist(), batch))
    for capacity in capacities:
        want = rate_by_sums(p, residents(batch * p, capacity), capacity)
        assert curve[capacity - 1] == pytest.approx(want, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(p=popularities(12), batch=BATCHES)
def test_more_slots_never_admit_less_and_as_many_as_adapters_admit_all(p, batch):
    curve = admission_curve(of_batch(p.tolist(), batch))
    assert np.diff(curve).min(initial=0) > -1e-10
    assert curve[-1] == pytest.approx(1, abs=1e-12)
    assert ((curve >= 0) & (curve <= 1)).all()


@settings(max_examples=40, deadline=None)
@given(p=popularities(12), batch=BATCHES, data=st.data())
def test_the_order_of_adapters_does_not_matter(p, batch, data):
    shuffled = data.draw(st.permutations(p.tolist()))
    np.testing.assert_allclose(
        admission_curve(of_batch(shuffled, batch)),
        admission_curve(of_batch(p.tolist(), batch)),
        rtol=0,
        atol=1e-10,
    )


def test_a_heavier_load_admits_less_where_tau_is_zero():
    p = zipf(100, 1.2).tolist()
    rates = [admission_curve(of_batch(p, batch))[49] for batch in (20.0, 60.0, 100.0, 140.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.999 > rates[-1]


@pytest.mark.parametrize("target", [0.5, 0.9, 0.95, 0.999, 1.0])
def test_minimum_capacity_is_algorithm_1s(target):
    p = zipf(14, 1.2).tolist()
    assert minimum_capacity(of_batch(p, 9.0), target) == algorithm_1.minimum_capacity(
        p, 9.0, min(target, 1 - 1e-10)
    )


def test_the_first_capacity_is_taken():
    assert first_capacity(np.array([0.2, 0.95, 0.95, 1.0]), 0.95) == 2
    assert first_capacity(np.array([0.2, 0.5, 1 - 1e-15]), 1.0) == 3


def test_little_s_law():
    """2 requests/s that stay 3 s are 6 in flight; the paper's lambda only if all stay as long."""
    got = of_rates([2.0, 6.0], [3.0, 0.5])
    assert got == Workload((0.25, 0.75), (6.0, 3.0))
    assert got.global_batch == 9
    same = of_rates([2.0, 6.0], [0.5, 0.5])
    assert same.accesses == of_batch(same.popularity, same.global_batch).accesses


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Workload((0.5, 0.5), (1.0,)), "one number per adapter, got 2 and 1"),
        (lambda: Workload((), ()), "one number per adapter"),
        (lambda: Workload((0.5, 0.4), (1.0, 1.0)), "sum to 1"),
        (lambda: Workload((1.5, -0.5), (1.0, 1.0)), "sum to 1"),
        (lambda: of_batch([1.0], -1.0), "accesses must be"),
        (lambda: of_batch([1.0], float("inf")), "accesses must be"),
        (lambda: of_rates([0.0, 0.0], [1.0, 1.0]), "above 0 for some adapter"),
        (lambda: of_rates([1.0, float("nan")], [1.0, 1.0]), "requests_per_s"),
        (lambda: minimum_capacity(of_batch([1.0], 1.0), 0.0), r"in \(0, 1\], got 0.0"),
        (lambda: minimum_capacity(of_batch([1.0], 1.0), 1.1), r"in \(0, 1\], got 1.1"),
    ],
)
def test_bad_input_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("adapters", "batch", "target_s"), [(512, 1024.0, 0.2), (10_000, 1024.0, 10.0)]
)
def test_all_capacities_take_no_longer_than_planned(adapters, batch, target_s):
    """Generous by ten: machines differ. The printed processor time is the one to read."""
    workload = of_batch(zipf(adapters, 1.2).tolist(), batch)
    start = time.thread_time()
    admission_curve(workload)
    took = time.thread_time() - start
    print(f"{adapters} adapters, {batch:.0f} requests in flight: {took:.3f} s of {target_s} s")
    assert took < 10 * target_s
