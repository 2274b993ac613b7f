"""InfiniLoRA's Algorithm 1 as it is written: the meaning of `provision`, in time O(N^4). No jax.

Three things the paper leaves open, and what is done here and in `provision`:

* Eq. 2 sums Poisson terms up to a whole number tau, and with whole tau Eq. 3 has no solution for
  most M. Between whole numbers the threshold is drawn: with tau = t + w it is t + 1 with
  probability w and else t, for each adapter on its own. That is Eq. 2 at whole tau, continuous
  and falling in between, and it can be simulated with whole access counts. (The regularised
  incomplete gamma function also agrees at whole tau, but no threshold on counts is behind it; on
  512 adapters with Zipf 1.2 the rates of the two differ by less than a point.)
* When M is above the expected number of distinct adapters in a batch, Eq. 3 asks for tau < 0:
  adapters that nobody asked for would count as resident and fill the cache, and no capacity but
  M = N would come near a rate of 1. Here tau stops at 0, an adapter occupies a slot only while it
  is used, and the rest of the slots is free. (Section 6.3.2 reports 100.0% for 256 slots and 512
  adapters, which only a tau that stops at 0 can give.)
* Residencies are independent, so more than M adapters may be resident at once in the model. Eq. 4
  is kept as it is; its rate is that of the model, not a bound for a cache that never overfills.

The text cites the listing's lines two too low (its line 3 is line 5, and so on). Line 16 is right
to stop at M - 1: the N - 1 other adapters must leave one of the M slots free.
"""

import math
from collections.abc import Sequence

import numpy as np


def exceeds(tau: float, accesses: float) -> float:
    """Return Q(lambda, tau) = Pr[Poisson(lambda) > tau], Eq. 2; see above for fractional tau."""
    whole = math.floor(tau)
    weight = tau - whole
    at_most = sum(_poisson(k, accesses) for k in range(whole + 1))
    return min(max(1 - at_most - weight * _poisson(whole + 1, accesses), 0.0), 1.0)


def admission_threshold(accesses: Sequence[float], capacity: int) -> float:
    """Return tau* >= 0 with sum_i Q(lambda_i, tau*) = M (Eq. 3, line 5), or 0 if that is too few.

    `accesses` are the lambda_i: expected accesses of each adapter in a global batch.
    """
    low, high = 0.0, 1.0
    if _expected_residents(accesses, low) <= capacity:
        return low
    while _expected_residents(accesses, high) > capacity:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _expected_residents(accesses, middle) > capacity:
            low = middle
        else:
            high = middle
    return high


def residencies(accesses: Sequence[float], capacity: int) -> np.ndarray:
    """Return float64 [adapters]: q_i of Eq. 2 at the threshold of Eq. 3 (line 6)."""
    tau = admission_threshold(accesses, capacity)
    return np.array([exceeds(tau, count) for count in accesses])


def free_slot_probability(resident: np.ndarray, adapter: int, capacity: int) -> float:
    """Return P_free(i): at most M - 1 of the other adapters are resident (lines 9 to 16).

    Dynamic programming over the Poisson-binomial distribution of `resident`, the q_j with j != i.
    """
    chance = np.zeros(len(resident) + 1)
    chance[0] = 1.0
    for other, q in enumerate(resident):
        if other != adapter:
            chance[1:] = chance[1:] * (1 - q) + chance[:-1] * q
            chance[0] *= 1 - q
    return float(chance[:capacity].sum())


def immediate_admission_rate(
    popularity: Sequence[float], resident: np.ndarray, capacity: int
) -> float:
    """Return IAR(M) = sum_i p_i (q_i + (1 - q_i) P_free(i)), Eq. 4 (lines 7 to 18)."""
    return sum(
        p * (q + (1 - q) * free_slot_probability(resident, adapter, capacity))
        for adapter, (p, q) in enumerate(zip(popularity, resident, strict=True))
    )


def minimum_capacity(popularity: Sequence[float], global_batch: float, target: float) -> int:
    """Return M*, the smallest cache capacity with IAR(M) >= target (Algorithm 1, Eq. 1)."""
    accesses = [global_batch * p for p in popularity]
    for capacity in range(1, len(accesses) + 1):
        resident = residencies(accesses, capacity)
        if immediate_admission_rate(popularity, resident, capacity) >= target:
            return capacity
    return len(accesses)  # IAR(N) is 1 up to rounding


def _expected_residents(accesses: Sequence[float], tau: float) -> float:
    return math.fsum(exceeds(tau, count) for count in accesses)


def _poisson(k: int, mean: float) -> float:
    if mean == 0:
        return float(k == 0)
    return math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
