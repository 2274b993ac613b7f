"""Requests a second and tokens a minute, by a clock that stands until it is moved."""

import pytest

from serving.http.access.rates import TokenBucket, TokenBudget


def test_bucket_allows_the_rate_and_says_how_long_to_wait():
    now = [0.0]
    bucket = TokenBucket(2.0, clock=lambda: now[0])
    assert [bucket.wait_s() for _ in range(3)] == [0.0, 0.0, 0.5]
    now[0] = 0.25
    assert bucket.wait_s() == pytest.approx(0.25)
    now[0] = 0.5
    assert bucket.wait_s() == 0.0
    now[0] = 100.0
    assert [bucket.wait_s() > 0 for _ in range(3)] == [False, False, True]


def test_a_slow_bucket_still_lets_one_through():
    now = [0.0]
    bucket = TokenBucket(0.1, clock=lambda: now[0])
    assert bucket.wait_s() == 0.0
    assert bucket.wait_s() == pytest.approx(10.0)


def test_a_budget_is_exact_over_time_whatever_a_request_took():
    now = [0.0]
    budget = TokenBudget(60, clock=lambda: now[0])
    assert budget.wait_s() == 0.0
    budget.spend(100)  # one request may go beyond it
    assert budget.wait_s() == pytest.approx(41.0)
    now[0] = 40.0
    assert budget.wait_s() == pytest.approx(1.0)
    now[0] = 41.0
    assert budget.wait_s() == 0.0
    now[0] = 1000.0
    assert budget.wait_s() == 0.0
    budget.spend(60)
    assert budget.wait_s() == pytest.approx(1.0)
