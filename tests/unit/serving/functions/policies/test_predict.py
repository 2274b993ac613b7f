"""Predicted rates and windows agree with counting and with the reference's numbers."""

import math
import random

import pytest

from serving.functions.policies.predict import Arrivals, expected_window, rate_of


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
    arrivals = Arrivals([0.0, 10.0, 20.0, 30.0])
    window = expected_window(0.1)
    assert arrivals.predicted_rate(30.0) == 0.0
    assert arrivals.predicted_rate(30.001 + window.start_s) == pytest.approx(0.1)
    assert arrivals.predicted_rate(29.999 + window.end_s) == pytest.approx(0.1)
    assert arrivals.predicted_rate(30.1 + window.end_s) == 0.0
    assert Arrivals([3.0]).predicted_rate(4.0) == 0.0
    assert expected_window(0.0).start_s == math.inf


def test_a_function_stays_while_it_was_just_used_or_is_expected():
    calls = Arrivals([0.0, 60.0, 120.0])
    assert calls.stays(121.0, keep_alive_s=2.0)
    assert not calls.stays(122.5, keep_alive_s=2.0)
    assert calls.stays(150.0, keep_alive_s=2.0)
    assert not calls.stays(120 + 60 * 3, keep_alive_s=2.0)
    assert not Arrivals().stays(0.0, keep_alive_s=2.0)
    assert Arrivals(begin=9.0).stays(10.0, keep_alive_s=2.0)  # it has just been started


def test_behind_a_burst_a_call_is_expected_until_the_longest_gap_that_followed_one():
    arrivals = Arrivals()
    for start in (0.0, 300.0, 900.0):
        for call in range(6):
            arrivals.add(start + call)
    last = 905.0
    assert arrivals.predicted_rate(last + 1) == pytest.approx(1.0)
    assert arrivals.predicted_rate(last + 100) == pytest.approx(1 / ((295 + 595) / 2))
    assert arrivals.predicted_rate(last + 1.09 * 595) > 0
    assert arrivals.predicted_rate(last + 1.11 * 595) == 0.0
    assert arrivals.stays(last + 500, keep_alive_s=60)


def test_only_the_last_ten_such_gaps_count():
    arrivals, now = Arrivals(), 0.0
    for gap_s in (3_000.0, *[100.0] * 10):
        for _ in range(6):
            arrivals.add(now)
            now += 1
        now += gap_s
    arrivals.add(now)
    arrivals.add(now + 0.1)
    assert arrivals.predicted_rate(now + 109) > 0
    assert arrivals.predicted_rate(now + 1_000) == 0.0


def test_a_steady_rate_has_no_gap_that_outlasts_it():
    arrivals = Arrivals([10.0 * n for n in range(50)])
    assert arrivals.last == 490.0
    assert arrivals.rate() == pytest.approx(0.1)
    assert arrivals.predicted_rate(490.0 + 60) == 0.0


def test_a_gap_of_hours_keeps_no_process_for_hours():
    arrivals = Arrivals([0.0, 1.0, 2.0, 4_000.0, 4_001.0])
    assert arrivals.predicted_rate(30_000.0) == 0.0
    assert arrivals.stays(4_002.0, keep_alive_s=10)
    assert not arrivals.stays(30_000.0, keep_alive_s=10)
