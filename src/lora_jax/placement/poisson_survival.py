"""Pr[Poisson(lambda) > t] for many lambda and t = 0, 1, 2, ...: Eq. 2 at whole tau. No jax."""

import math
from collections.abc import Iterator

import numpy as np

_BLOCK = 64  # thresholds computed at a time
_SMALLEST = 1e-15  # of a mean; below it the probability of an access is no longer seen


def survival_rows(means: np.ndarray) -> Iterator[np.ndarray]:
    """Yield float64 [adapters] for t = 0, 1, 2, ... without end: Pr[Poisson(means) > t].

    `means` must be falling. Values are right to 1e-12 absolute.
    """
    means = np.maximum(means, _SMALLEST)
    roots = np.sqrt(means)
    below = np.zeros(len(means))  # Pr[Poisson < first threshold of the block]
    first = 0
    while True:
        # Pr[Poisson(m) >= k] <= exp(-(sqrt(k) - sqrt(m))^2), so that these adapters are all that
        # can exceed the block's thresholds.
        live = int(np.searchsorted(-roots, 6.0 - math.sqrt(first + 1), side="right"))
        counts = np.arange(first, first + _BLOCK)
        at_most = below[:live] + np.cumsum(_pmf(counts, means[:live]), axis=0)
        for row in at_most:
            survival = np.zeros(len(means))
            survival[:live] = np.clip(1 - row, 0, 1)
            yield survival
        below = at_most[-1]
        first += _BLOCK


def _pmf(counts: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Return [counts, means]: exp(-k (x - log(1 + x))) / (k! e^k / k^k), x = (mean - k) / k.

    So written, large means lose no digits: both factors of the usual form would be huge.
    """
    k = np.maximum(counts, 1)[:, None].astype(np.float64)
    x = np.maximum((means - k) / k, -1 + 1e-15)  # a mean that is lost beside k makes it -1
    log_scale = np.array([_log_stirling(int(count)) for count in np.maximum(counts, 1)])
    values = np.exp(-k * (x - np.log1p(x)) - log_scale[:, None])
    values[counts == 0] = np.exp(-means)
    return values


def _log_stirling(k: int) -> float:
    """Return log(k! e^k / k^k)."""
    if k < 16:
        return math.lgamma(k + 1) + k - k * math.log(k)
    series = 1 / (12 * k) - 1 / (360 * k**3) + 1 / (1260 * k**5) - 1 / (1680 * k**7)
    return 0.5 * math.log(2 * math.pi * k) + series
