"""Rows of sampling state: packed on the host, unpacked on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.api.sampling import Sampling
from serving.steps.device_state import MAX_SUPPRESSED, admit, init_row_state, pack_row, row_of

MAX_LEN, VOCAB = 24, 50


def pack(sampling, tokens=(1, 2, 3), num_prompt=3, seed=7, end_ids=(0,)):
    return pack_row(sampling, tokens, num_prompt, seed, end_ids, MAX_LEN, VOCAB)


def admit_one(sampling, row=1, **kwargs):
    packed = pack(sampling, **kwargs)
    return admit(init_row_state(3, MAX_LEN), row, packed)


def test_a_row_arrives_as_it_was_packed_and_no_other_row_changes():
    sampling = Sampling(
        max_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        min_tokens=2,
        stop_token_ids=(11, 5),
        logit_bias={3: 1.5, 40: -2.0},
        logprobs=0,
    )
    state = admit_one(sampling, tokens=[9, 8, 7, 6], num_prompt=3)
    row = row_of(state, jnp.int32(1))
    np.testing.assert_array_equal(row.history, [9, 8, 7, 6] + [0] * 20)
    scalars = (row.num_prompt, row.min_tokens, row.top_k, row.edits, row.penalties, row.logprobs)
    assert scalars == (3, 2, 4, 1, 1, 1)
    assert (row.temperature, row.top_p, row.min_p) == (0.5, 0.75, 0.125)
    assert (row.repetition_penalty, row.presence_penalty, row.frequency_penalty) == (
        1.5,
        0.25,
        -0.5,
    )
    np.testing.assert_array_equal(row.suppressed_ids[:3], [0, 5, 11])
    assert set(row.suppressed_ids[3:].tolist()) == {VOCAB}
    np.testing.assert_array_equal(row.bias_ids[:2], [3, 40])
    np.testing.assert_array_equal(row.bias_values[:3], [1.5, -2.0, 0.0])
    assert set(row.bias_ids[2:].tolist()) == {VOCAB}
    for leaf in jax.tree.leaves(state):
        assert not np.asarray(leaf)[[0, 2]].any()


def test_neutral_values_switch_processors_off():
    row = row_of(admit_one(Sampling(top_k=VOCAB)), jnp.int32(1))
    assert (row.top_k, row.edits, row.penalties, row.logprobs) == (0, 0, 0, 0)


def test_keys_differ_by_seed_only():
    def keys(**kwargs):
        return np.asarray(admit_one(Sampling(), **kwargs).key[1]).tolist()

    assert keys(seed=1) == keys(seed=1, tokens=(5,), num_prompt=1)
    assert keys(seed=1) != keys(seed=2)
    assert keys(seed=0) != keys(seed=2**31 - 1)


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31 - 1])
def test_a_key_of_the_host_is_the_one_that_jax_makes_of_the_seed(seed):
    key = jax.random.key(0, impl="threefry2x32")
    wanted = jax.random.key_data(jax.random.fold_in(key, seed)).tolist()
    assert admit_one(Sampling(), seed=seed).key[1].tolist() == wanted
    assert not admit_one(Sampling(temperature=0.0), seed=seed).key[1].any()  # it draws nothing


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="25 tokens does not fit into 24"):
        pack(Sampling(), tokens=range(25))
    many = range(MAX_SUPPRESSED + 1)
    with pytest.raises(ValueError, match=f"{MAX_SUPPRESSED + 1} stop and end ids"):
        pack(Sampling(max_tokens=5, min_tokens=1), end_ids=many)
    pack(Sampling(max_tokens=5), end_ids=many)  # without min_tokens none is needed
