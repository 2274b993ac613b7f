"""Requests a second and tokens a minute, by a clock that stands until it is moved."""

import threading

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


def test_processes_that_name_one_file_have_one_budget(tmp_path):
    """Before: each instance let a key take its tokens."""
    clock = [100.0]
    one, other = (TokenBudget(60, lambda: clock[0], tmp_path / "key") for _ in range(2))
    assert one.wait_s() == other.wait_s() == 0.0
    one.spend(40)
    other.spend(30)
    assert one.wait_s() == other.wait_s() == 11.0
    clock[0] += 11
    assert other.wait_s() == 0.0
    other.spend(1)
    late = TokenBudget(60, lambda: clock[0], tmp_path / "key")  # an instance that is started anew
    assert late.wait_s() == one.wait_s() == 1.0
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_hosts_whose_clocks_differ_a_little_let_no_more_through(tmp_path):
    now = [1000.0]
    ahead = TokenBudget(60, lambda: now[0] + 2.0, tmp_path / "key")
    late = TokenBudget(60, lambda: now[0], tmp_path / "key")
    ahead.spend(60)
    for _ in range(20):  # each look of one after the other's would add two seconds
        assert ahead.wait_s() == 1.0
        assert late.wait_s() == 3.0  # when its own clock is there
    now[0] += 1.0
    assert ahead.wait_s() == late.wait_s() == 0.0


def test_a_clock_that_was_far_ahead_does_not_close_a_key(tmp_path):
    """As time.monotonic of another host is: its zero is when that host was booted."""
    wrong, right = (TokenBudget(60, lambda t=t: t, tmp_path / "key") for t in (1e6, 1000.0))
    assert wrong.wait_s() == 0.0
    assert right.wait_s() == 0.0
    right.spend(60)
    assert right.wait_s() == 1.0


def test_threads_and_processes_lose_no_charge(tmp_path):
    budgets = [TokenBudget(6000, lambda: 0.0, tmp_path / "key") for _ in range(4)]
    threads = [
        threading.Thread(target=lambda b=b: [b.spend(1) for _ in range(500)]) for b in budgets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    budgets[0].spend(4000)
    assert budgets[1].wait_s() == pytest.approx(0.01)


def test_without_its_file_a_budget_is_the_process_s_own(tmp_path):
    budget = TokenBudget(60, lambda: 0.0, tmp_path / "gone" / "key")
    budget.spend(60)
    assert budget.wait_s() == 1.0


def test_a_full_disk_leaves_each_process_its_own_budget(tmp_path, monkeypatch):
    """Before: every request of the key failed."""
    clock = [100.0]
    budget = TokenBudget(60, lambda: clock[0], tmp_path / "key")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    assert budget.wait_s() == 0.0
    budget.spend(70)
    assert budget.wait_s() == 11.0
