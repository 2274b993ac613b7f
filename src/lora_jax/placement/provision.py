"""Capacity of a LoRA Server for a tail TTFT (InfiniLoRA, section 4.2.1). No jax.

tests/support/oracles/algorithm_1.py says what is computed and how the paper's gaps are filled; this
is the same for all capacities at once, to 1e-9, in milliseconds. Two steps make it fast: the
threshold moves through whole numbers once while M falls, and sum_i p_i (1 - q_i) P_free(i) is one
transform, not N.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lora_jax.placement.poisson_binomial import admissible_miss, value_at
from lora_jax.placement.poisson_survival import survival_rows

_ROUNDING = 1e-10  # of a rate; a target of 1.0 is met from here on


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests by adapter.

    `popularity` are the p_i: a request asks for adapter i; they sum to 1. `accesses` are the
    lambda_i: expected requests of adapter i among those in flight. The paper sets lambda_i =
    LB * p_i (`of_batch`), which holds when all adapters' requests stay equally long;
    `of_rates` does without. Raises ValueError for what are no such numbers.
    """

    popularity: tuple[float, ...]
    accesses: tuple[float, ...]

    def __post_init__(self) -> None:
        p, accesses = np.array(self.popularity), np.array(self.accesses)
        if p.ndim != 1 or p.size == 0 or p.shape != accesses.shape:
            raise ValueError(
                f"popularity and accesses must be one number per adapter, got {p.size} and "
                f"{accesses.size}."
            )
        if not (np.isfinite(p).all() and p.min() >= 0 and abs(p.sum() - 1) < 1e-6):
            raise ValueError(f"popularity must be 0 or more and sum to 1, its sum is {p.sum()}.")
        if not (np.isfinite(accesses).all() and accesses.min() >= 0):
            raise ValueError("accesses must be 0 or more and finite.")

    @property
    def global_batch(self) -> float:
        """Expected requests in flight, LB."""
        return float(np.sum(self.accesses))


def of_batch(popularity: Sequence[float], global_batch: float) -> Workload:
    """Return the workload of Table 2: lambda_i = LB * p_i (line 3 of Algorithm 1)."""
    return Workload(tuple(popularity), tuple(global_batch * p for p in popularity))


def of_rates(requests_per_s: Sequence[float], seconds: Sequence[float]) -> Workload:
    """Return the workload of arrival rates and times in flight, by Little's law.

    lambda_i is rate times time and p_i the share of the arrivals. Raises ValueError if nothing
    arrives.
    """
    rates = np.array(requests_per_s, np.float64)
    if rates.size == 0 or not (np.isfinite(rates).all() and rates.min() >= 0 and rates.sum() > 0):
        raise ValueError("requests_per_s must be 0 or more, and above 0 for some adapter.")
    accesses = rates * np.array(seconds, np.float64)
    return Workload(tuple((rates / rates.sum()).tolist()), tuple(accesses.tolist()))


def admission_curve(workload: Workload) -> np.ndarray:
    """Return float64 [adapters]: at index M - 1 the rate IAR(M) of Eq. 4.

    Equal to immediate_admission_rate of tests/support/oracles/algorithm_1.py to 1e-9 for every M.
    """
    order = np.argsort(-np.array(workload.accesses), kind="stable")
    popularity = np.array(workload.popularity)[order]
    curve = np.empty(len(popularity))
    window, last = (0, np.zeros(1)), None
    for capacity, resident in _residencies(np.array(workload.accesses)[order]):
        if resident is not last:  # all capacities with tau = 0 share one distribution
            window, last = admissible_miss(resident, popularity), resident
        curve[capacity - 1] = popularity @ resident + value_at(*window, capacity - 1)
    return np.clip(curve, 0, 1)


def minimum_capacity(workload: Workload, target: float) -> int:
    """Return M*, the smallest M with IAR(M) >= target (Eq. 1, Algorithm 1).

    Raises ValueError for a target outside (0, 1].
    """
    return first_capacity(admission_curve(workload), target)


def first_capacity(curve: np.ndarray, target: float) -> int:
    """Return the first capacity of an `admission_curve` that meets the target.

    Raises ValueError for a target outside (0, 1].
    """
    if not 0 < target <= 1:
        raise ValueError(f"The target admission rate must be in (0, 1], got {target}.")
    met = curve >= target - _ROUNDING
    return int(np.argmax(met)) + 1 if met.any() else len(curve)


def _residencies(accesses: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (M, q) for M = N, ..., 1: q_i of Eq. 2 at the tau of Eq. 3, with `accesses` falling.

    Between whole tau, q and so its sum are linear in tau, which solves Eq. 3 without a search.
    """
    capacity = len(accesses)
    rows = survival_rows(accesses)
    at = next(rows)
    while capacity >= max(at.sum(), 1):
        yield capacity, at
        capacity -= 1
    for after in rows:
        while capacity >= max(after.sum(), 1):
            weight = (at.sum() - capacity) / (at.sum() - after.sum())
            yield capacity, (1 - weight) * at + weight * after
            capacity -= 1
        if capacity < 1:
            return
        at = after
