"""Hit ratios of adapter tiers for a known popularity. numpy only."""

import numpy as np

from lora_jax.typing import Float

_ROUNDS = 200  # of the bisection: more than a float has digits


def zipf(count: int, alpha: float) -> Float[np.ndarray, "count"]:
    """Return the shares of `count` adapters, the most popular first: p_i ~ i ** -alpha.

    Raises ValueError for a count below 1 and for a negative alpha.
    """
    if count < 1 or alpha < 0:
        raise ValueError(f"Need at least 1 adapter and alpha 0 or more, not {count} and {alpha}.")
    weights = np.arange(1, count + 1, dtype=np.float64) ** -alpha
    return weights / weights.sum()


def top_share(shares: Float[np.ndarray, "count"], held: int) -> float:
    """Return the share of requests for the `held` most popular adapters: no policy hits more."""
    return float(np.sort(shares)[::-1][: max(held, 0)].sum())


def lru_hits(shares: Float[np.ndarray, "count"], held: int) -> float:
    """Return the hit ratio of the `held` longest-used adapters, for independent requests.

    Che's approximation: with T such that sum_i 1 - exp(-p_i T) = held, adapter i is there with
    probability 1 - exp(-p_i T) (Che, Tung, Wang, "Hierarchical Web caching systems", 2002).
    """
    shares = shares[shares > 0]  # nobody asks for the others
    if held <= 0:
        return 0.0
    if held >= len(shares):
        return 1.0
    low, high = 0.0, 1.0
    while _held(shares, high) < held:
        high *= 2
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if _held(shares, middle) < held else (low, middle)
    return float((shares * -np.expm1(-shares * high)).sum())


def _held(shares: Float[np.ndarray, "count"], time: float) -> float:
    return float(-np.expm1(-shares * time).sum())
