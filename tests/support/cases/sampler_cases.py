"""Shared sampler cases: logits, rows of sampling parameters, and a run of a sampler."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np

from serving.api.sampling import Sampling
from serving.steps.device_state import admit, init_row_state, pack_row, row_of
from serving.steps.sampling.sampler import LogitRows

VOCAB, MAX_LEN, SEQS = 301, 16, 8
MIXED = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    Sampling(temperature=1.0, logprobs=5, frequency_penalty=1.0, repetition_penalty=1.1),
    Sampling(temperature=1.3, logit_bias={5: 3.0}, min_tokens=8, max_tokens=9),
    Sampling(temperature=1.0, top_p=0.5, logprobs=0),
]


def make_logits(rows, seed=0, ties=True):
    logits = np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 3
    return np.round(logits, 1) if ties else logits


def make_state(samplings, tokens=(4, 5, 6), num_prompt=2, end_ids=(0,), seeds=None, bad_words=()):
    """Row i has samplings[i]."""
    state = init_row_state(SEQS, MAX_LEN)
    for row, sampling in enumerate(samplings):
        seed = 100 + row if seeds is None else seeds[row]
        packed = pack_row(sampling, tokens, num_prompt, seed, end_ids, MAX_LEN, VOCAB, bad_words)
        state = admit(state, row, packed)
    return state


def one_row(sampling, **kwargs):
    return row_of(make_state([sampling], **kwargs), jnp.int32(0))


def on_host(tree):
    """Return the fields that the sampler fills, as numpy arrays."""
    found = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    filled = {name: np.asarray(array) for name, array in found.items() if array is not None}
    return types.SimpleNamespace(**filled)


def run_with(sample, logits, state, rows, positions=3, targets=-1, pad_to=None):
    """Sample logits[i] with row rows[i] of the state, in a bucket of `pad_to` rows."""
    count, bucket = len(rows), pad_to or len(rows)

    def padded(values, fill):
        full = np.full(bucket, fill, np.int32)
        full[:count] = values
        return jnp.asarray(full)

    padded_logits = np.zeros((bucket, VOCAB), np.float32)
    padded_logits[:count] = logits
    logit_rows = LogitRows(
        num_rows=jnp.int32(count),
        row_to_token=padded(range(count), 0),
        row_to_seq=padded(rows, 0),
        row_to_slot=padded(-1, -1),
        positions=padded(positions, 0),
        targets=padded(targets, -1),
    )
    return on_host(sample(jnp.asarray(padded_logits), logit_rows, state))
