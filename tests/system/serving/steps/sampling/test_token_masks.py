"""A mask takes tokens out of the rows that it binds, and changes no bit of the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.sampler_cases import MIXED, SEQS, VOCAB, make_logits, make_state, run_with

from serving.steps.sampling import batch_sampler, sampler
from serving.steps.sampling.token_masks import HostMasks, allowed_tokens, num_words, unpack_masks

BUCKET = 8
SAMPLERS = {"rows": sampler.sample, "at once": batch_sampler.sample}


def masks_of(allowed):
    """Masks of some rows: ids by row."""
    masks = HostMasks(SEQS, BUCKET + 1, VOCAB)
    masks.words[...] = 0x55555555  # of rows without a mask: never read
    for place, (row, ids) in enumerate(allowed.items()):
        bits = np.zeros(32 * masks.words.shape[1], np.uint8)
        bits[list(ids)] = 1
        masks.words[SEQS - 1 - place] = np.packbits(bits, bitorder="little").view(np.int32)
        masks.row_to_mask[row] = SEQS - 1 - place
    return unpack_masks(jnp.asarray(masks.packed), SEQS, VOCAB)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 300])
def test_bits_are_tokens(vocab):
    ids = sorted({0, vocab - 1, vocab // 2})
    bits = np.zeros(32 * num_words(vocab), np.uint8)
    bits[ids] = 1
    words = np.packbits(bits, bitorder="little").view(np.int32)
    got = np.asarray(allowed_tokens(jnp.asarray(words), vocab))
    assert np.flatnonzero(got).tolist() == ids


@functools.cache
def jitted(name):
    return jax.jit(SAMPLERS[name])


def run(name, masks, targets=-1):
    return run_with(
        lambda *args: jitted(name)(*args, masks),
        make_logits(len(MIXED)),
        make_state(MIXED),
        range(len(MIXED)),
        targets=targets,
        pad_to=BUCKET,
    )


@pytest.mark.parametrize("name", SAMPLERS)
def test_masked_rows_take_what_is_allowed_and_others_keep_their_bits(name):
    allowed = {0: {7, 90, 300}, 2: {11}, 3: set(range(200, 230))}
    free, bound = run(name, None), run(name, masks_of(allowed))
    for row in range(len(MIXED)):
        if row in allowed:
            assert bound.token_ids[row] in allowed[row]
            continue
        for field in vars(free):
            np.testing.assert_array_equal(getattr(bound, field)[row], getattr(free, field)[row])
    best = max(allowed[0], key=lambda token: make_logits(len(MIXED))[0][token])
    assert bound.token_ids[0] == best
    # Log-probabilities are of what is allowed: one token alone is certain.
    assert bound.logprobs[2] == 0
    assert bound.top_ids[2][0] == 11
    assert np.isneginf(bound.top_logprobs[2][1:]).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_token_that_is_scored_is_not_masked(name):
    targets = [3] * len(MIXED)
    free, bound = (run(name, m, targets) for m in (None, masks_of({row: {7} for row in range(5)})))
    np.testing.assert_array_equal(bound.logprobs, free.logprobs)


def test_both_samplers_agree():
    masks = masks_of({0: {7, 90}, 1: set(range(0, 300, 7)), 4: {1, 2, 3}})
    got, want = (run(name, masks) for name in SAMPLERS)
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-6)
