"""Predicted rates and windows agree with counting and with the reference's numbers."""

import math
import random

import pytest

from serving.functions.policies.predict import expected_window, predicted_rate, rate_of, stays


def test_rate_is_that_of_the_last_five_gaps():
    assert rate_of([0, 100, 101, 102, 103, 104, 105]) == 1.0
    assert rate_of([0, 4]) == 0.25
    assert rate_of([7]) == rate_of([]) == 0.0


def test_simultaneous_arrivals_have_a_finite_rate():
    assert rate_of([5.0, 5.0, 5.0]) == pytest.approx(1000.0)


def test_window_at_half_a_request_a_minute():
    window = expected_window(0.5 / 60)
    assert window.start_s == pytest.approx(7.4, abs=0.05)
    assert window.end_s / 60 == pytest.approx(5.6, abs=0.05)


def test_window_holds_as_many_arrivals_as_it_says():
    """Against counted Poisson gaps: 6% come before the window, 6% after it."""
    rng, rate = random.Random(1), 0.2
    window = expected_window(rate)
    gaps = [rng.expovariate(rate) for _ in range(20_000)]
    assert sum(g < window.start_s for g in gaps) / len(gaps) == pytest.approx(0.06, abs=0.006)
    assert sum(g > window.end_s for g in gaps) / len(gaps) == pytest.approx(0.06, abs=0.006)


def test_prediction_ends_when_the_arrival_is_overdue():
    arrivals = [0.0, 10.0, 20.0, 30.0]
    window = expected_window(0.1)
    assert predicted_rate(arrivals, 30.0) == 0.0
    assert predicted_rate(arrivals, 30.001 + window.start_s) == pytest.approx(0.1)
    assert predicted_rate(arrivals, 29.999 + window.end_s) == pytest.approx(0.1)
    assert predicted_rate(arrivals, 30.1 + window.end_s) == 0.0
    assert predicted_rate([3.0], 4.0) == 0.0
    assert expected_window(0.0).start_s == math.inf


def test_a_function_stays_while_it_was_just_used_or_is_expected():
    calls = [0.0, 60.0, 120.0]
    assert stays(calls, 121.0, keep_alive_s=2.0)
    assert not stays(calls, 122.5, keep_alive_s=2.0)
    assert stays(calls, 150.0, keep_alive_s=2.0)
    assert not stays(calls, 120 + 60 * 3, keep_alive_s=2.0)
    assert not stays([], 0.0, keep_alive_s=2.0)
