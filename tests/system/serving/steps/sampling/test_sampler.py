"""Every processor against numpy, and the promise that a row knows nothing of its neighbours."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.sampler_cases import MIXED, VOCAB, make_logits, make_state, one_row, run_with

from serving.api.sampling import Sampling
from serving.steps.sampling import sampler

sample = jax.jit(sampler.sample)
BUCKET = 8  # of most tests: each is a program, and seconds to compile


def run(logits, state, rows, *, pad_to=BUCKET, **options):
    """Return what the sampler gives for logits[i] with row rows[i], in a bucket of `pad_to`."""
    whole = run_with(sample, logits, state, rows, pad_to=pad_to, **options)
    return types.SimpleNamespace(**{name: got[: len(rows)] for name, got in vars(whole).items()})


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def test_greedy_takes_the_first_of_the_largest():
    logits = make_logits(4)
    logits[2, [7, 9]] = 50.0
    result = run(logits, make_state([Sampling(temperature=0.0)]), [0] * 4)
    np.testing.assert_array_equal(result.token_ids, logits.argmax(-1))
    assert result.token_ids[2] == 7
    assert not result.logprobs.any()
    assert not result.top_ids.any()


def test_logprobs_are_of_the_raw_logits():
    logits = make_logits(2)
    state = make_state([Sampling(temperature=0.0, logprobs=0, logit_bias={17: 100.0})])
    result = run(logits, state, [0, 0])
    want = log_softmax(logits)
    np.testing.assert_array_equal(result.token_ids, [17, 17])
    np.testing.assert_allclose(result.logprobs, want[:, 17], atol=1e-5)
    np.testing.assert_array_equal(result.ranks, 1 + (logits > logits[:, 17:18]).sum(-1))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, : sampler.MAX_LOGPROBS]
    np.testing.assert_array_equal(result.top_ids, order)
    np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(want, order, -1), atol=1e-5)


def test_targets_are_scored_and_not_sampled():
    logits = make_logits(3)
    targets = [5, 299, 0]
    result = run(logits, make_state([Sampling()]), [0] * 3, targets=targets)
    np.testing.assert_array_equal(result.token_ids, targets)
    np.testing.assert_allclose(
        result.logprobs, log_softmax(logits)[np.arange(3), targets], atol=1e-5
    )


def test_bias_and_min_tokens():
    sampling = Sampling(
        max_tokens=9, min_tokens=2, stop_token_ids=(8,), logit_bias={3: 1.5, 300: -2.0, 8: 5.0}
    )
    row, logits = one_row(sampling, num_prompt=2, end_ids=(0,)), make_logits(1)[0]
    want = logits.copy()
    want[[3, 300, 8]] += np.float32([1.5, -2.0, 5.0])
    after = sampler.apply_edits(jnp.asarray(logits), jnp.int32(4), row)
    np.testing.assert_array_equal(after, want)
    want[[0, 8]] = -np.inf
    for position in (2, 3):
        before = sampler.apply_edits(jnp.asarray(logits), jnp.int32(position), row)
        np.testing.assert_array_equal(before, want)


def test_only_allowed_tokens_are_left():
    sampling = Sampling(allowed_token_ids=[7, 300, 7], logit_bias={9: 100.0})
    row, logits = one_row(sampling), make_logits(1)[0]
    got = sampler.keep_allowed(jnp.asarray(logits), jnp.int32(3), row)
    want = np.full(VOCAB, -np.inf, np.float32)
    want[[7, 300]] = logits[[7, 300]]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("position", "barred"),
    [
        (2, [9]),  # the first sampled token: what stands in the prompt starts no word
        (3, [9, 20]),
        (4, [9, 21, 20]),
        (5, [9]),
        (6, [9, 20]),
    ],
)
def test_bad_words_are_barred_where_they_would_be_complete(position, barred):
    tokens = [4, 5, 5, 6, 7, 5]  # prompt 4 5; output 5 6 7 5
    words = ((9,), (5, 20), (5, 6, 21), (6, 20), (4, 5, 22), (5, 5, 23))
    row = one_row(Sampling(), tokens=tokens, num_prompt=2, bad_words=words)
    logits = make_logits(1)[0]
    got = sampler.drop_bad_words(jnp.asarray(logits), jnp.int32(position), row)
    want = logits.copy()
    want[barred] = -np.inf
    np.testing.assert_array_equal(got, want)


def test_the_bars_hold_whatever_the_other_processors_do():
    sampling = Sampling(temperature=1.5, allowed_token_ids=[3, 9, 11], logit_bias={200: 100.0})
    state = make_state([sampling], bad_words=((9,),), seeds=[1])
    logits = make_logits(8)
    result = run(logits, state, [0] * 8, positions=np.arange(3, 11))
    assert set(result.token_ids.tolist()) == {3, 11}


def test_where_no_token_is_left_none_is_taken():
    state = make_state([Sampling(temperature=0.0, allowed_token_ids=[9])], bad_words=((9,),))
    assert run(make_logits(1), state, [0]).token_ids == sampler.NO_TOKEN


def test_penalties_tell_prompt_from_output():
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    tokens = [4, 5, 4, 7, 7, 9, 11]  # prompt 4 5 4; output 7 7 9; 11 stands at the position itself
    row, logits = one_row(sampling, tokens=tokens, num_prompt=3), make_logits(1)[0]
    got = sampler.apply_penalties(jnp.asarray(logits), jnp.int32(6), row)
    want = logits.copy()
    for token in (4, 5, 7, 9):
        want[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
    want[7] -= 0.5 + 2 * 0.25
    want[9] -= 0.5 + 0.25
    np.testing.assert_allclose(got, want, rtol=1e-6)
    untouched = np.setdiff1d(np.arange(VOCAB), [4, 5, 7, 9])
    np.testing.assert_array_equal(np.asarray(got)[untouched], logits[untouched])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_give_no_token(bad, temperature):
    logits = make_logits(2)
    logits[0, 3] = bad
    state = make_state([Sampling(temperature=temperature)])
    result = run(logits, state, [0, 0])
    assert result.token_ids[0] == sampler.INVALID_TOKEN
    assert result.token_ids[1] >= 0


def test_draws_follow_the_distribution():
    """Chi-squared of 4000 draws over the 5 kept tokens stays below the 99.99% quantile."""
    sampling = Sampling(temperature=1.5, top_k=5, seed=1)
    logits = make_logits(1, seed=8, ties=False)
    count = 4000
    state = make_state([sampling])
    result = run(
        np.repeat(logits, count, 0), state, [0] * count, positions=np.arange(count), pad_to=count
    )
    order = np.argsort(-logits[0])[:5]
    probs = np.exp(log_softmax(logits[0, order] / 1.5))
    drawn = np.array([(result.token_ids == token).sum() for token in order])
    assert drawn.sum() == count
    chi_squared = ((drawn - count * probs) ** 2 / (count * probs)).sum()
    assert chi_squared < 23.5


@pytest.mark.parametrize("bound", [{"min_p": 0.5}, {"top_k": 2}, {"top_p": 0.1}, {"top_k": 1}])
def test_each_bound_alone_keeps_unlikely_tokens_from_being_drawn(bound):
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [7, 200]] = 3.0, 2.9  # together a tenth of the probability
    state = make_state([Sampling(temperature=0.9, **bound)])
    result = run(np.repeat(logits, 8, 0), state, [0] * 8, positions=np.arange(3, 11))
    assert set(result.token_ids.tolist()) == ({7} if bound == {"top_k": 1} else {7, 200})


def test_a_row_is_the_same_bits_in_any_company():
    logits = make_logits(len(MIXED), ties=False)
    state = make_state(MIXED)
    together = run(logits, state, range(len(MIXED)), pad_to=64)
    for place in range(len(MIXED)):
        alone = run(logits[place : place + 1], state, [place])
        for name, got in vars(together).items():
            np.testing.assert_array_equal(got[place], getattr(alone, name)[0])


def test_noise_depends_on_seed_and_position_only():
    sampling = Sampling(temperature=2.0)
    logits = np.repeat(make_logits(1), 6, 0)
    state = make_state([sampling] * 6, seeds=[3, 4, 5, 3, 6, 7])
    first = run(logits, state, [0, 1, 2, 3, 4, 5], positions=9).token_ids
    moved = run(logits, state, [3, 5, 4, 0, 2, 1], positions=9).token_ids
    assert first[0] == first[3] == moved[0] == moved[3]
    np.testing.assert_array_equal(moved, first[[3, 5, 4, 0, 2, 1]])
    other = run(logits, state, [0, 1, 2, 3, 4, 5], positions=10).token_ids
    assert (first != other).any()
    assert len(set(first.tolist())) > 1


def test_a_row_is_traced_once_for_programs_of_all_sizes(monkeypatch):
    traced, score = [], sampler.score
    monkeypatch.setattr(sampler, "score", lambda *given: (traced.append(given), score(*given))[1])
    state, vocab = make_state([Sampling()]), VOCAB + 1  # no other test's, which would be there
    for count in (8, 32):
        ints = jnp.zeros(count, jnp.int32)
        rows = sampler.LogitRows(jnp.int32(1), ints, ints, ints, ints, ints)
        tokens = jax.eval_shape(
            lambda *given: sampler.sample(*given).token_ids, jnp.zeros((count, vocab)), rows, state
        )
        assert tokens.shape == (count,)
    assert len(traced) == 1
