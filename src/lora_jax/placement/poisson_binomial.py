"""Poisson-binomial distribution of the number of resident adapters, computed fast. No jax.

The distribution is read off its Fourier transform on a window around its mean. The transform is
a product over adapters; where many adapters have similar q, their factors are taken at a few
Chebyshev points instead, with weights that make the sum of logarithms the same.
"""

import math

import numpy as np

_TAIL = 30.0  # what lies outside the window, and each frequency left out, is below exp(-30)
_SURE = 1e-15  # of a probability: below it never, this near to 1 always
_POINTS = 20
_FEW = 256  # adapters of similar q that are cheaper one by one
_SMOOTH = 50.0  # variance from which the factors of q near 1/2 are smooth at all frequencies kept


def admissible_miss(resident: np.ndarray, popularity: np.ndarray) -> tuple[int, np.ndarray]:
    """Return (low, G): G[s - low] = Pr[the request misses, and at most s adapters are resident].

    The request asks for adapter i with probability `popularity`[i]; adapter j is resident with
    probability `resident`[j], float64 and falling in j. As sum_i p_i (1 - q_i) P_free(i) of Eq. 4
    is the chance that the asked adapter is absent and no more than M - 1 adapters are resident in
    all, it is G at M - 1. G is 0 below `low` and constant beyond its end; right to 1e-11.
    """
    core = slice(*np.searchsorted(-resident, [-(1 - _SURE), -_SURE]))
    always, never = int(core.start), float(popularity[core.stop :].sum())
    resident, popularity = resident[core], popularity[core]
    variance = float((resident * (1 - resident)).sum())
    low, period = _window(float(resident.sum()), variance, len(resident))
    angles = 2 * math.pi / period * np.arange(period // 2 + 1)
    angles = angles[variance * (1 - np.cos(angles)) <= _TAIL]
    whole, misses = _transform(resident, popularity, angles, variance)
    spectrum = np.zeros(period // 2 + 1, np.complex128)
    spectrum[: len(angles)] = np.conj(whole * (misses + never) * np.exp(-1j * angles * low))
    return low + always, np.cumsum(np.fft.irfft(spectrum, n=period))


def value_at(low: int, cumulative: np.ndarray, count: int) -> float:
    """Return G at `count` from what `admissible_miss` returned."""
    if count < low:
        return 0.0
    return float(cumulative[min(count - low, len(cumulative) - 1)])


def _window(mean: float, variance: float, largest: int) -> tuple[int, int]:
    """Return the start and the odd length of a window that Bernstein's bound says suffices.

    An odd length keeps the angle pi out, where a factor of q = 1/2 would be 0.
    """
    reach = _TAIL / 3 + math.sqrt((_TAIL / 3) ** 2 + 2 * _TAIL * variance)
    low = max(0, math.floor(mean - reach))
    high = min(largest, math.ceil(mean + reach))
    return low, (high - low + 1) | 1


def _transform(
    resident: np.ndarray, popularity: np.ndarray, angles: np.ndarray, variance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return prod_j f_j and sum_i p_i (1 - q_i) / f_i, where f = 1 - q + q exp(i angle)."""
    step = np.exp(1j * angles) - 1
    whole, misses = np.ones(len(angles), np.complex128), np.zeros(len(angles), np.complex128)
    cuts = [0, *np.searchsorted(-resident, [-0.75, -0.25]), len(resident)]
    alone: list[slice] = []
    for start, end, right, is_middle in zip(
        cuts[:-1], cuts[1:], (1.0, 0.75, 0.25), (False, True, False), strict=True
    ):
        part = slice(int(start), int(end))
        if end - start <= _FEW or (is_middle and variance < _SMOOTH):
            alone.append(part)
            continue
        left = right - (0.5 if is_middle else 0.25)
        points, weights = _condense(resident[part], popularity[part], left, right)
        factors = 1 + points[:, None] * step
        whole *= np.exp((weights[0][:, None] * np.log(factors)).sum(axis=0))
        misses += ((weights[1] * (1 - points))[:, None] / factors).sum(axis=0)
    q = np.concatenate([resident[:0], *(resident[part] for part in alone)])
    p = np.concatenate([popularity[:0], *(popularity[part] for part in alone)])
    factors = 1 + q[:, None] * step
    return whole * factors.prod(axis=0), misses + ((p * (1 - q))[:, None] / factors).sum(axis=0)


def _condense(
    resident: np.ndarray, popularity: np.ndarray, left: float, right: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return Chebyshev points of [left, right] and, [2, points], what they stand for.

    For a smooth g, g(points) @ weights[0] is sum_j g(q_j), and with weights[1] sum_j p_j g(q_j).
    """
    x = (2 * resident - left - right) / (right - left)
    moments = np.empty((2, _POINTS))
    before, now, twice = x, np.ones_like(x), 2 * x  # T_-1 is T_1
    for degree in range(_POINTS):
        moments[:, degree] = now.sum(), np.einsum("i,i", now, popularity)  # beats threads of BLAS
        before, now = now, twice * now - before
    degrees = np.arange(_POINTS)
    cosines = np.cos(math.pi / _POINTS * np.outer(degrees, degrees + 0.5))
    moments *= np.where(degrees == 0, 1, 2) / _POINTS
    return (left + right) / 2 + cosines[1] * (right - left) / 2, moments @ cosines
