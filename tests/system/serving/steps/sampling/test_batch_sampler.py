"""All rows at once give what the loop over rows gives, whatever stands together."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.cases.sampler_cases import MIXED, VOCAB, make_logits, make_state, run_with

from serving.api.sampling import Sampling
from serving.steps.sampling import batch_sampler, sampler

sample = jax.jit(batch_sampler.sample)
at_once = functools.partial(run_with, sample)
by_rows = functools.partial(run_with, jax.jit(sampler.sample))
ROWS = [
    *MIXED,
    Sampling(temperature=0.9),
    Sampling(temperature=0.0, logit_bias={5: 30.0}, allowed_token_ids=(5, 6, 7)),
]
BUCKET = 8  # one for all tests: each is a program, and seconds to compile


def check_same(*args, **kwargs):
    got, want = (run(*args, pad_to=BUCKET, **kwargs) for run in (at_once, by_rows))
    for name in ("token_ids", "ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-6)
    return got


@pytest.mark.parametrize("vocab", [1, 5, 16, 300, 4097])
def test_log_sum_exp_is_that_without_a_reduction_over_floats(vocab):
    """XLA orders a reduction by the whole array: a row alone would have other bits."""
    logits = 9 * np.random.default_rng(vocab).standard_normal((3, vocab), np.float32)
    got = jax.jit(jax.vmap(batch_sampler.log_sum_exp))(logits)
    want = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert "reduce_sum" not in str(jax.make_jaxpr(batch_sampler.log_sum_exp)(logits[0]))


@pytest.mark.parametrize("seed", range(4))
def test_every_pair_of_requests(seed):
    logits = make_logits(2, seed, ties=False)
    state = make_state(ROWS, bad_words=((17,), (6, int(logits[0].argmax()))))
    for rows in itertools.combinations(range(len(ROWS)), 2):
        check_same(logits, state, list(rows))


def test_all_together_with_targets_and_padding():
    count = len(ROWS)
    targets = [-1, 7, -1, 300, -1, -1, -1]
    got = check_same(make_logits(count), make_state(ROWS), range(count), targets=targets)
    assert got.token_ids[1] == 7
    assert got.logprobs[1] < 0
    assert not got.token_ids[count:].any()


@pytest.mark.parametrize("row", range(len(ROWS)))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_logits_give_no_token_in_any_branch(row, bad):
    logits = make_logits(2)
    logits[0, 5] = bad
    got = at_once(logits, make_state(ROWS), [row, 0], pad_to=BUCKET)
    assert got.token_ids[0] == sampler.INVALID_TOKEN
    assert got.token_ids[1] >= 0


@pytest.mark.parametrize("bad", [None, np.nan])
def test_a_row_without_tokens_is_told_from_bad_logits(bad):
    """Whatever keeps the likely ones, which takes both for logits without any."""
    fields = ({"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 3}, {"top_p": 0.5})
    rows = [Sampling(allowed_token_ids=[9], **more) for more in fields]
    logits = make_logits(len(rows))
    logits[:, 9] = logits[:, 9] if bad is None else bad
    state = make_state(rows, bad_words=((9,),) if bad is None else ())
    got = check_same(logits, state, range(len(rows)))
    want = sampler.NO_TOKEN if bad is None else sampler.INVALID_TOKEN
    assert got.token_ids[: len(rows)].tolist() == [want] * len(rows)


def test_rows_of_an_ended_sequence_ask_for_nothing():
    """Padding rows name row 0 of the state, whose wishes must not count."""
    logits = make_logits(1, ties=False)
    state = make_state([ROWS[2], Sampling(temperature=0.0)])
    got = check_same(logits, state, [1])
    assert not got.top_logprobs.any()


@pytest.mark.parametrize("vocab", [20, 300, 1024, 1030, 2500])
@pytest.mark.parametrize("k", [1, 7, 20])
def test_pieces_have_the_top_as_a_whole_sort_does(k, vocab):
    rng = np.random.default_rng(k)
    logits = rng.integers(-9, 9, vocab).astype(np.float32)  # with ties
    logits[5] = -np.inf
    few = np.full(vocab, -np.inf, np.float32)
    few[[3, vocab - 1]] = 1.0, 2.0
    for values in (logits, few):
        got, want = (
            jax.jit(top, static_argnums=1)(jnp.asarray(values), k)
            for top in (batch_sampler.top_of_pieces, lax.top_k)
        )
        for mine, its in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("top", [lax.top_k, batch_sampler.top_of_pieces])
def test_zeros_of_either_sign_tie_as_in_the_greedy_choice(top):
    logits = jnp.full(30, -2.0).at[3].set(-0.0).at[7].set(0.0)
    token = sampler.argmax(logits)
    scored = sampler.score(logits, token, top)
    assert token == 3
    assert scored.top_ids[:2].tolist() == [3, 7]
    assert scored.ranks == 1


def test_floats_are_never_summed_by_a_reduction():
    """XLA orders one by the rows around; integers have no order to choose."""
    texts = []

    def traced(*args):
        texts.append(str(jax.make_jaxpr(batch_sampler.sample)(*args)))
        return sample(*args)

    run_with(traced, make_logits(2), make_state(ROWS), [1, 2], pad_to=BUCKET)
    kinds = re.findall(r":(\w+)\[[\d,]*\] = (?:reduce_sum|reduce)\[", texts[0])
    assert kinds
    assert not [kind for kind in kinds if kind.startswith("f")]


def test_programs_of_equal_rows_trace_each_part_once(monkeypatch):
    """A server has several programs for each number of rows. Parts with an op stay outside."""
    calls, rows = collections.Counter(), 3 * BUCKET  # no other test traces so many
    parts = ("draw_scaled", "apply_edits", "apply_penalties", "score")

    def counted(name, given):
        def call(*args):
            calls[name] += 1
            return given(*args)

        return call

    for name in parts:
        monkeypatch.setattr(batch_sampler, name, counted(name, getattr(batch_sampler, name)))
    monkeypatch.setattr(batch_sampler, "keep_likely", lambda scaled, *limits: scaled)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def traced(*args):
        leaves, tree = jax.tree.flatten(args)
        program = jax.jit(lambda leaves: batch_sampler.sample(*tree.unflatten(leaves)))
        assert program.lower(leaves).as_text().count("func.func private @_draw_rows") == 1
        return sampler.no_samples(rows, VOCAB)

    for _ in range(2):
        run_with(traced, make_logits(3), make_state(MIXED[:3]), [0, 1, 2], pad_to=rows)
    assert calls == dict.fromkeys(parts, 1)
