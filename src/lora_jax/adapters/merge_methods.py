"""Combination types of PEFT's `add_weighted_adapter`, on the A and B of one module. No jax.

`cat` is the exact sum. The others work on A and B alone, each times the square root of weight *
scaling, so that their product is not the sum of what the adapters add. `ties`: Yadav et al. 2023,
arXiv 2306.01708; `dare_*`: Yu et al. 2024, arXiv 2311.03099. All sums are in float32.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

COMBINATION_TYPES = ("cat", "linear", "ties", "dare_linear", "dare_ties")
SIGN_METHODS = ("total", "frequency")
Pair = tuple[np.ndarray, np.ndarray]  # A [rank, d_in], B [d_out, rank]


@dataclasses.dataclass(frozen=True)
class Method:
    """Method of combining adapters. Raises ValueError for options that exclude each other."""

    combination_type: str = "cat"
    density: float | None = None  # share of the values that stay
    majority_sign_method: str = "total"
    seed: int = 0  # of dare_*

    def __post_init__(self) -> None:
        kind = self.combination_type
        if kind not in COMBINATION_TYPES:
            allowed = ", ".join(COMBINATION_TYPES)
            raise ValueError(f"combination_type is {kind!r}; it must be one of {allowed}.")
        if self.majority_sign_method not in SIGN_METHODS:
            raise ValueError(
                f"majority_sign_method is {self.majority_sign_method!r}; it must be one of "
                f"{', '.join(SIGN_METHODS)}."
            )
        if not self.prunes and self.density is not None:
            raise ValueError(f"{kind} prunes nothing; leave density out.")
        if self.prunes and (self.density is None or not 0 < self.density <= 1):
            raise ValueError(f"{kind} needs a density above 0 and at most 1, got {self.density}.")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more.")

    @property
    def prunes(self) -> bool:
        """True if only a fraction of the values is kept."""
        return self.combination_type not in ("cat", "linear")


def combine_pairs(
    pairs: Sequence[Pair],
    weights: Sequence[float],
    scalings: Sequence[float],
    method: Method,
    rng: np.random.Generator,
) -> Pair:
    """Return A and B in float32 whose product, with scaling 1, is the combination.

    `cat` takes any ranks, the others equal ones. `rng` serves dare_*: the values of every A are
    drawn, in the order of the parts, then those of every B.
    """
    pairs = [(a.astype(np.float32), b.astype(np.float32)) for a, b in pairs]
    if method.combination_type == "cat":
        scaled = [
            a * np.float32(weight) * np.float32(scaling)
            for (a, _), weight, scaling in zip(pairs, weights, scalings, strict=True)
        ]
        return np.concatenate(scaled, axis=0), np.concatenate([b for _, b in pairs], axis=1)
    products = [weight * scaling for weight, scaling in zip(weights, scalings, strict=True)]
    of_b = [math.sqrt(abs(product)) for product in products]
    of_a = [math.copysign(root, product) for root, product in zip(of_b, products, strict=True)]
    made_a = _combine([a for a, _ in pairs], of_a, method, rng)
    return made_a, _combine([b for _, b in pairs], of_b, method, rng)


def _combine(
    matrices: list[np.ndarray], weights: list[float], method: Method, rng: np.random.Generator
) -> np.ndarray:
    """Return the combination of matrices of one shape."""
    if method.prunes:
        matrices = [_prune(matrix, method, rng) for matrix in matrices]
    weighted = [m * np.float32(weight) for m, weight in zip(matrices, weights, strict=True)]
    if not method.combination_type.endswith("ties"):
        return _sum(weighted)
    agree = _agree(matrices, method.majority_sign_method)
    kept = [matrix * mask for matrix, mask in zip(weighted, agree, strict=True)]
    return _sum(kept) / np.maximum(_sum(agree), np.float32(1))


def _prune(matrix: np.ndarray, method: Method, rng: np.random.Generator) -> np.ndarray:
    """Return the matrix with a share of its values: the largest, or random ones enlarged.

    Of values of equal size the first ones stay.
    """
    density = method.density
    if density is None or density >= 1:
        return matrix
    if method.combination_type.startswith("dare"):
        return matrix * random_mask(matrix.shape, density, rng) / np.float32(density)
    order = np.argsort(-np.abs(matrix), axis=None, kind="stable")
    mask = np.zeros(matrix.size, np.float32)
    mask[order[: int(density * matrix.size)]] = 1
    return matrix * mask.reshape(matrix.shape)


def random_mask(shape: tuple[int, ...], density: float, rng: np.random.Generator) -> np.ndarray:
    """Return float32 zeros and ones, each 1 with probability `density`."""
    return (rng.random(shape, np.float32) < np.float32(density)).astype(np.float32)


def _agree(matrices: list[np.ndarray], method: str) -> list[np.ndarray]:
    """Return a mask for each: 1 where its sign is that of the (unweighted) majority, 0 elsewhere.

    A tie of signs counts as positive; a value of 0 has no sign and never agrees.
    """
    signs = [np.sign(matrix) for matrix in matrices]
    total = _sum(matrices if method == "total" else signs)
    majority = np.where(total >= 0, np.float32(1), np.float32(-1))
    return [(sign == majority).astype(np.float32) for sign in signs]


def _sum(matrices: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum in the order of the parts."""
    total = matrices[0]
    for matrix in matrices[1:]:
        total = total + matrix
    return total
