"""Predicted arrival rate of a function, from its last few gaps (arrivals taken as Poisson).

ServerlessLoRA names no predictor. This is the one of a later paper of the same group (Tyche): the
rate is that of the last 5 gaps; artifacts are worth loading from the moment at which an arrival is
6% likely until it is 94% overdue.
"""

import dataclasses
import math
from collections.abc import Sequence

GAPS = 5


@dataclasses.dataclass(frozen=True)
class Window:
    """Seconds after the last arrival between which the next one is expected."""

    start_s: float
    end_s: float


def rate_of(arrivals: Sequence[float]) -> float:
    """Return requests per second over the last 5 gaps of the rising times; 0 below two arrivals.

    Simultaneous arrivals count as 1 ms apart, or their rate would be infinite.
    """
    recent = arrivals[-(GAPS + 1) :]
    if len(recent) < 2:
        return 0.0
    return (len(recent) - 1) / max(recent[-1] - recent[0], 1e-3 * (len(recent) - 1))


def expected_window(rate: float, low: float = 0.06, high: float = 0.94) -> Window:
    """Return when the probability of an arrival, 1 - exp(-rate t), passes `low` and `high`.

    A rate of 0 gives a window that never begins.
    """
    if rate <= 0:
        return Window(math.inf, math.inf)
    return Window(-math.log1p(-low) / rate, -math.log1p(-high) / rate)


def predicted_rate(arrivals: Sequence[float], now: float) -> float:
    """Return the rate that pre-loading counts with: 0 outside of the expected window."""
    rate = rate_of(arrivals)
    if not rate:
        return 0.0
    window = expected_window(rate)
    return rate if window.start_s <= now - arrivals[-1] <= window.end_s else 0.0


def stays(arrivals: Sequence[float], now: float, keep_alive_s: float) -> bool:
    """Return whether an idle function keeps its process: just used, or the next call expected."""
    just_used = bool(arrivals) and now - arrivals[-1] <= keep_alive_s
    return just_used or predicted_rate(arrivals, now) > 0
