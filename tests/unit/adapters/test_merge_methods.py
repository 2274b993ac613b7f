"""Combination types against formulas written value by value, and what Method refuses."""

import math

import numpy as np
import pytest

from lora_jax.adapters.merge_methods import Method, combine_pairs, random_mask

WEIGHTS, SCALINGS = (0.7, -1.5, 0.4), (2.0, 0.5, 1.0)


def pairs_of(ranks=(3, 3, 3), d_in=7, d_out=5):
    rng = np.random.default_rng(0)
    shapes = [((rank, d_in), (d_out, rank)) for rank in ranks]
    return [tuple(rng.standard_normal(s).astype("f4") for s in both) for both in shapes]


def combined(method, pairs):
    rng = np.random.default_rng(method.seed)
    return combine_pairs(pairs, WEIGHTS, SCALINGS, method, rng)


def masks_of(method, matrices, rng):
    """Return which values stay, and by what they are divided."""
    if method.density is None:
        return [np.ones(m.shape) for m in matrices], 1.0
    if method.combination_type.startswith("dare"):
        return [random_mask(m.shape, method.density, rng) for m in matrices], method.density
    masks = []
    for matrix in matrices:
        sizes = sorted(abs(float(v)) for v in matrix.flat)[::-1]
        least = sizes[int(method.density * len(sizes)) - 1]
        masks.append((np.abs(matrix) >= least).astype("f4"))
    return masks, 1.0


def by_value(method, matrices, roots, rng):
    """Return the combination, one value after the other, in float64."""
    masks, divisor = masks_of(method, matrices, rng)
    made = np.zeros(matrices[0].shape)
    for place in np.ndindex(made.shape):
        found = [float(m[place]) * k[place] / divisor for m, k in zip(matrices, masks, strict=True)]
        if not method.combination_type.endswith("ties"):
            made[place] = sum(v * root for v, root in zip(found, roots, strict=True))
            continue
        votes = found if method.majority_sign_method == "total" else np.sign(found)
        sign = 1 if sum(votes) >= 0 else -1
        kept = [v * r for v, r in zip(found, roots, strict=True) if v * sign > 0]
        made[place] = sum(kept) / max(1, len(kept))
    return made


@pytest.mark.parametrize("sign", ["total", "frequency"])
@pytest.mark.parametrize(
    ("kind", "density"),
    [("linear", None), ("ties", 0.5), ("ties", 1.0), ("dare_linear", 0.6), ("dare_ties", 0.6)],
)
def test_every_value_is_that_of_the_formula(kind, density, sign):
    method = Method(kind, density, sign, seed=3)
    pairs = pairs_of()
    made = combined(method, pairs)
    rng = np.random.default_rng(3)
    roots = [math.sqrt(abs(w * s)) for w, s in zip(WEIGHTS, SCALINGS, strict=True)]
    signed = [math.copysign(r, w) for r, w in zip(roots, WEIGHTS, strict=True)]
    for side, of_side in enumerate((signed, roots)):
        want = by_value(method, [pair[side] for pair in pairs], of_side, rng)
        np.testing.assert_allclose(made[side], want, rtol=1e-5, atol=1e-6)
        assert made[side].dtype == np.float32


def test_cat_is_the_sum_of_what_the_parts_add():
    pairs = pairs_of(ranks=(1, 4, 2))
    a, b = combined(Method("cat"), pairs)
    want = sum(
        w * s * (pb.astype("f8") @ pa)
        for w, s, (pa, pb) in zip(WEIGHTS, SCALINGS, pairs, strict=True)
    )
    np.testing.assert_allclose(b.astype("f8") @ a, want, rtol=1e-5, atol=1e-6)
    assert a.shape[0] == 7


def test_of_equal_sizes_the_first_stay_and_zeros_have_no_sign():
    ones = np.ones((2, 2), np.float32)
    pairs = [(ones, ones), (-ones, -ones)]
    made, _ = combine_pairs(
        pairs, (1.0, 1.0), (1.0, 1.0), Method("ties", 0.5), np.random.default_rng(0)
    )
    # +1 and -1 sum to 0, which counts as positive; nothing is left of the second row.
    np.testing.assert_array_equal(made, [[1, 1], [0, 0]])


def test_a_seed_draws_the_same_values_and_another_others():
    pairs = pairs_of()
    first, again, other = (combined(Method("dare_linear", 0.5, seed=s), pairs) for s in (1, 1, 2))
    np.testing.assert_array_equal(first[0], again[0])
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"combination_type": "svd"}, "combination_type is 'svd'; it must be one of cat, linear"),
        ({"combination_type": "ties"}, "ties needs a density above 0 and at most 1, got None"),
        ({"combination_type": "dare_ties", "density": 0.0}, "got 0.0"),
        ({"combination_type": "ties", "density": math.nan}, "got nan"),
        ({"combination_type": "cat", "density": 0.5}, "cat prunes nothing; leave density out"),
        ({"majority_sign_method": "mean"}, "majority_sign_method is 'mean'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_what_does_not_go_together_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        Method(**given)
