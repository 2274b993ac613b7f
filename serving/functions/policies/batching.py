"""Fill-or-expire batches of one function (ServerlessLoRA, section 4.2, Eq. 3 and 4).

Taken literally, Eq. 4 lets a lone request wait until its SLO: a batch leaves when it is full or
after d = SLO - T(N). The reading here: a batch leaves at once while the device is free for it, and
is held, for at most d from its first request's arrival, only while something else has the device or
the function is still loading. `literal` is the form of the text, for comparisons.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class PrefillTime:
    """Eq. 3: T(b) = base_s + slope_s (b - 1), seconds to the first tokens of b requests."""

    base_s: float
    slope_s: float

    def __post_init__(self) -> None:
        if not (0 < self.base_s < math.inf and 0 <= self.slope_s < math.inf):
            raise ValueError(
                f"base_s must be above 0 and slope_s 0 or more, got {self.base_s}, {self.slope_s}."
            )

    def seconds(self, batch: int) -> float:
        """Return T(batch)."""
        return self.base_s + self.slope_s * (batch - 1)


def fit(batches: Sequence[int], seconds: Sequence[float]) -> PrefillTime:
    """Return the least-squares line through measured prefills, with a slope of 0 or more.

    Raises ValueError for fewer than two sizes, and for seconds that leave no time for one request.
    """
    x, y = np.asarray(batches, np.float64) - 1, np.asarray(seconds, np.float64)
    if x.shape != y.shape or len(set(batches)) < 2:
        raise ValueError("the fit needs one time per batch, and batches of two sizes or more.")
    spread = x - x.mean()
    slope = max(float(spread @ (y - y.mean()) / (spread @ spread)), 0.0)
    # A slope that the bound has moved leaves the mean as the best constant.
    return PrefillTime(float(y.mean() - slope * x.mean()), slope)


def largest_batch(time: PrefillTime, slo_s: float, limit: int) -> int:
    """Return B: the largest batch of at most `limit` with T(B) <= SLO; 1 where none meets it."""
    if time.seconds(limit) <= slo_s:
        return limit
    if time.slope_s == 0:
        return 1
    guess = math.floor((slo_s - time.base_s) / time.slope_s) + 2  # one more than by rounding
    while guess > 1 and time.seconds(guess) > slo_s:
        guess -= 1
    return max(1, guess)


def expires_at(time: PrefillTime, slo_s: float, batch: int, first: float) -> float:
    """Return when a batch that began to wait at `first` has to run to meet its deadline."""
    return first + max(slo_s - time.seconds(batch), 0.0)


def leaves_at(
    time: PrefillTime,
    slo_s: float,
    largest: int,
    arrivals: Sequence[float],
    free_at: float,
    *,
    literal: bool = False,
) -> float:
    """Return when a batch of these waiting requests is released, if no other arrives before.

    Args:
        time: Eq. 3 of the function on this device.
        slo_s: TTFT that the function promises.
        largest: B; more requests than B leave as several batches.
        arrivals: when the requests came, in order, at least one.
        free_at: from when on device and function are free; `inf` while that is not known.
        literal: wait as the text of Eq. 4 says, also while the device is free.
    """
    count = min(len(arrivals), largest)
    first, newest = arrivals[0], arrivals[count - 1]
    if count == largest:
        return newest
    expires = expires_at(time, slo_s, count, first)
    if literal:
        return max(newest, expires)
    return max(newest, min(expires, free_at))
