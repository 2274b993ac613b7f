"""Delays grow with the wrong keys of late, to a bound, and go again."""

from serving.http.access.failed_keys import FREE, MOST_S, FailedKeys


def test_a_few_cost_nothing_many_cost_seconds_and_time_heals():
    now = [0.0]
    failed = FailedKeys(clock=lambda: now[0])
    assert [failed.delay_s() for _ in range(int(FREE))] == [0.0] * int(FREE)
    delays = [failed.delay_s() for _ in range(1000)]
    assert delays == sorted(delays)
    assert delays[0] > 0
    assert delays[-1] == MOST_S
    now[0] = 200.0
    assert failed.delay_s() == 0.0
