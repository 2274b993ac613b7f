"""Batch sizes and release times, against every size and every millisecond."""

import itertools
import math

import numpy as np
import pytest

from serving.functions.policies.batching import (
    PrefillTime,
    expires_at,
    fit,
    largest_batch,
    leaves_at,
)


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.1, 0.37])
@pytest.mark.parametrize("slo", [0.1, 0.5, 0.8, 2.5])
def test_largest_batch_is_the_largest_of_all_sizes(slope, slo):
    time = PrefillTime(0.4, slope)
    meets = [b for b in range(1, 41) if time.seconds(b) <= slo]
    assert largest_batch(time, slo, 40) == max(meets, default=1)


def test_fit_is_the_least_squares_line():
    batches, seconds = [1, 2, 4, 8, 8], [0.31, 0.33, 0.42, 0.55, 0.61]
    time = fit(batches, seconds)
    design = np.stack([np.ones(5), np.array(batches) - 1.0], 1)
    base, slope = np.linalg.lstsq(design, np.array(seconds), rcond=None)[0]
    assert (time.base_s, time.slope_s) == pytest.approx((base, slope))


def test_fit_never_says_that_more_requests_take_less():
    assert fit([1, 4], [0.5, 0.3]) == PrefillTime(0.4, 0.0)
    with pytest.raises(ValueError, match="two sizes"):
        fit([3, 3], [0.1, 0.2])
    with pytest.raises(ValueError, match="base_s must be above 0"):
        fit([4, 8], [0.1, 0.9])


def search(time, slo, largest, arrivals, free_at, literal):
    """Return the first millisecond at which a rule of section 4.2 releases the batch."""
    for tick in itertools.count(round(arrivals[0] * 1000)):
        now = tick / 1000
        here = [a for a in arrivals if a <= now][:largest]
        whole = len(here) == min(len(arrivals), largest)
        full = len(here) == largest
        expired = now >= round(arrivals[0] + max(slo - time.seconds(len(here)), 0), 9)
        if full or (whole and (expired or (not literal and now >= free_at))):
            return now
    return math.inf


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("free_at", [0.0, 0.25, 5.0])
@pytest.mark.parametrize("arrivals", [(0.1,), (0.1, 0.2), (0.1, 0.2, 0.21, 0.3), (0.1, 0.9)])
def test_release_is_the_first_millisecond_that_a_rule_allows(arrivals, free_at, literal):
    time = PrefillTime(0.2, 0.05)
    found = leaves_at(time, 0.6, 4, arrivals, free_at, literal=literal)
    assert found == pytest.approx(search(time, 0.6, 4, arrivals, free_at, literal))


def test_a_batch_expires_when_its_prefill_would_end_at_the_deadline():
    time = PrefillTime(0.25, 0.125)
    assert expires_at(time, 1.0, 3, 7.0) == 7.5
    assert expires_at(time, 0.1, 3, 7.0) == 7.0  # it cannot meet it: at once


def test_lone_request_does_not_wait_while_the_device_is_free():
    time = PrefillTime(0.5, 0.1)
    assert leaves_at(time, 2.5, 16, [7.0], free_at=0.0) == 7.0
    assert leaves_at(time, 2.5, 16, [7.0], free_at=7.3) == 7.3
    assert leaves_at(time, 2.5, 16, [7.0], free_at=math.inf) == 9.0
    assert leaves_at(time, 2.5, 16, [7.0], free_at=0.0, literal=True) == 9.0
