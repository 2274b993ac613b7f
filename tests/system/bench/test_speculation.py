"""Figures of the bench of speculation."""

import pytest

from bench.speculation import GREEDY, _interval, free


@pytest.mark.parametrize(
    ("count", "inside"), [(1, (1, 1)), (5, (1, 5)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))]
)
def test_an_interval_holds_the_median_with_95_percent(count, inside):
    """Of 20 values at most 5 lie on one side with a chance of 2.1 %, of 9 at most one with 2.0."""
    values = [float(value) for value in range(count, 0, -1)]
    assert _interval(values) == inside


def test_requests_run_as_many_at_once_as_the_work_says():
    for at_once, batches in ((1, 4), (4, 1), (8, 1)):
        work = free(at_once, GREEDY)
        sizes = [len(prompts) for prompts, _ in work.batches()]
        assert sizes == [at_once] * batches
        assert [a for _, adapters in work.batches() for a in adapters] == work.adapters
