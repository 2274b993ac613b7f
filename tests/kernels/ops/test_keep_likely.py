"""Tokens that min_p, top_k and top_p keep, against sorted logits, by every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.likely_cases import LIKELY_CASES

from lora_jax.ops.keep_likely import keep_likely, reference, xla

VOCAB = 300


def make_logits(seed=0, ties=True):
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3
    return np.round(logits) if ties else logits


def probabilities(logits):
    shares = np.exp(logits.astype(np.float64) - logits.max())
    return shares / shares.sum()


# test_emulated.py compares with the same meaning on these.
FURTHER = ("few tokens", "many ties", "one logit", "more than shared memory holds")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long if n in FURTHER else ()) for n in LIKELY_CASES],
)
def test_portable_is_the_meaning(name):
    case = LIKELY_CASES[name]
    got, want = (keep_likely(*case, implementation=name) for name in ("xla", "reference"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("top_k", [1, 2, 17, 300])
def test_top_k_keeps_k_and_ties(top_k):
    logits = make_logits(top_k)
    logits[:2] = [0.0, -0.0]  # equal floats with different bits
    got = np.asarray(reference.keep_top_k(jnp.asarray(logits), jnp.int32(top_k)))
    kth = np.sort(logits)[-top_k]
    np.testing.assert_array_equal(got, np.where(logits >= kth, logits, -np.inf))
    assert np.isfinite(got).sum() >= top_k


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set(top_p):
    logits = make_logits(3, ties=False)
    kept = np.isfinite(np.asarray(reference.keep_top_p(jnp.asarray(logits), jnp.float32(top_p))))
    probs = probabilities(logits)
    order = np.argsort(-probs)
    needed = int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1
    want = np.zeros(VOCAB, bool)
    want[order[:needed]] = True
    np.testing.assert_array_equal(kept, want)


def test_top_p_keeps_ties():
    logits = jnp.zeros(VOCAB, jnp.float32).at[5].set(8.0)
    kept = np.isfinite(np.asarray(reference.keep_top_p(logits, jnp.float32(0.95))))
    assert kept.all()  # token 5 has 0.91; all others tie


def test_min_p_is_relative_to_the_most_likely():
    logits = make_logits()
    got = np.asarray(reference.keep_min_p(jnp.asarray(logits), jnp.float32(0.05)))
    probs = probabilities(logits)
    np.testing.assert_array_equal(np.isfinite(got), probs >= 0.05 * probs.max())


def test_min_p_of_one_keeps_what_ties_with_the_most_likely():
    logits = jnp.zeros(VOCAB, jnp.float32).at[5:8].set(3.0)
    got = np.asarray(reference.keep_min_p(logits, jnp.float32(1.0)))
    assert np.flatnonzero(np.isfinite(got)).tolist() == [5, 6, 7]


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_neutral_values_keep_tokens_whose_weight_is_nothing(name):
    logits = jnp.array([[0.0, -20.0, -80.0, -1e30, -jnp.inf]])  # less than 2^-26 of the largest
    neutral = jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.ones(1)
    np.testing.assert_array_equal(keep_likely(logits, *neutral, implementation=name), logits)


def test_weights_of_the_largest_vocabulary_are_summed_exactly():
    """Its tokens are equally likely, or have every low bit."""
    vocab = reference.MOST_TOKENS
    weights = jnp.full(vocab, (1 << 26) - 1, jnp.uint32)
    want = vocab * ((1 << 26) - 1)
    np.testing.assert_allclose(float(reference.weight_sum(weights)), want, rtol=2e-7)
    kept = reference.keep_top_p(jnp.zeros(vocab), jnp.float32(0.5))
    assert np.isfinite(np.asarray(kept)).all()


def test_a_larger_vocabulary_is_refused():
    logits = jnp.zeros((1, reference.MOST_TOKENS + 1))
    what = "vocabulary of 524,288 tokens; top_p is exact for up to 524,287"
    with pytest.raises(ValueError, match=what):
        keep_likely(logits, jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.ones(1))
    with pytest.raises(ValueError, match=what):
        reference.keep_top_p(logits[0], jnp.float32(0.5))


def test_image_orders_all_floats():
    values = np.array(
        [-np.inf, -3e38, -1.5, -2e-38, -0.0, 0.0, 2e-38, 2.0, 3e38, np.inf], np.float32
    )
    image = np.asarray(reference.ordered_image(jnp.asarray(values))).astype(np.int64)
    steps = np.diff(image)
    assert steps[4] == 0
    assert (np.delete(steps, 4) > 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_digits_find_the_threshold_that_bits_do(seed):
    rng = np.random.default_rng(seed)
    image = jnp.asarray(rng.integers(0, 1 << 32, 50, dtype=np.uint32))
    ones = jnp.ones(50, jnp.uint32)
    weights = jnp.asarray(rng.integers(0, 1 << 26, 50, dtype=np.uint32))
    for given in ((ones, 7), (ones, 60), (weights, 9e8)):
        got, want = (
            jax.jit(search)(image, given[0], jnp.float32(given[1]))
            for search in (xla.threshold_by_digits, reference.threshold_by_bits)
        )
        assert got == want


@pytest.mark.usefixtures("shapes_unchecked")
def test_limits_that_are_not_one_a_row_are_named():
    logits, ones = jnp.ones((3, 50)), jnp.ones(3)
    with pytest.raises(ValueError, match=r"keep_likely: min_p has shape \(2,\), expected \(3,\)"):
        keep_likely(logits, jnp.ones(2), jnp.ones(3, jnp.int32), ones)
    with pytest.raises(ValueError, match=r"keep_likely: top_k .* is float32, expected int32"):
        keep_likely(logits, ones, ones, ones)
