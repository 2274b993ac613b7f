"""Embeddings and logits of rows whose adapters bring rows of the vocabulary; others keep theirs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from support.cases import adapter_cases as cases

from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.slots import LoraLoadJob, init_slots, size_slots
from lora_jax.adapters.vocabulary import (
    EMBEDDING,
    HEAD,
    PARTS,
    saved_name,
    tokens_name,
    with_vocabulary,
)
from lora_jax.adapters.weights import AdapterWeights, SiteWeights
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.vocabulary import own_embeddings, own_logits

CATALOGUE = with_vocabulary(cases.llama(), tied=True, most_tokens=3, most_saved=1)
HIDDEN, VOCAB = CATALOGUE.modules["lm_head"].d_in, CATALOGUE.modules["lm_head"].d_out
RNG = np.random.default_rng(0)
ROWS, WHOLE = (RNG.normal(size=(n, HIDDEN)).astype("f4") for n in (2, VOCAB))
IDS = (5, 2)


def load(slots, allocator, weights):
    job = LoraLoadJob(allocator.place(weights), slots)
    slots = job.advance(slots, job.remaining)
    allocator.finish_loading(weights.digest)
    return slots


def adapter(digest, sites, **more):
    report = cases.weights(CATALOGUE, 1, names=()).report
    report = dataclasses.replace(report, digest=digest, brings=("rows",))
    return AdapterWeights({(name, 0): site for name, site in sites.items()}, report, **more)


def test_rows_have_the_embeddings_and_logits_of_their_own_adapter():
    spec = size_slots(CATALOGUE, 3, 2, 4)
    slots = init_slots(CATALOGUE, spec, jnp.dtype("float32"))
    allocator = SlotAllocator(CATALOGUE, 3, spec.rows)
    a, whole = ROWS[None], WHOLE.reshape(1, 1, -1)
    head = SiteWeights(a, np.eye(2, 64, dtype="f4")[None], 1.0)
    tokens = {tokens_name(EMBEDDING): SiteWeights(a, a, 1.0), tokens_name(HEAD): head}
    slots = load(slots, allocator, adapter("t", tokens, token_ids=dict.fromkeys(PARTS, IDS)))
    saved = dict.fromkeys(map(saved_name, PARTS), SiteWeights(whole, whole, 1.0))
    slots = load(slots, allocator, adapter("s", saved))
    given, owners = np.array([5, 5, 5, 2, 3, 0], np.int32), np.array([0, 1, -1, 0, 0, 1], np.int32)
    names = CATALOGUE.module_names
    routing = AdapterRouting(jnp.int32(6), jnp.asarray(owners), slots, names, 4)
    base = RNG.normal(size=(6, HIDDEN)).astype("f4")
    got = own_embeddings(jnp.asarray(base), jnp.asarray(given), routing, VOCAB)
    want = np.stack([ROWS[0], WHOLE[5], base[2], ROWS[1], base[4], WHOLE[0]])
    np.testing.assert_array_equal(got, want)
    logits, states = (RNG.normal(size=(6, n)).astype("f4") for n in (VOCAB, HIDDEN))
    got = np.asarray(own_logits(jnp.asarray(logits), jnp.asarray(states), routing))
    for row, owner in enumerate(owners):
        expected = logits[row].copy()
        if owner == 0:
            expected[list(IDS)] = ROWS @ states[row]
        elif owner == 1:
            expected = WHOLE @ states[row]
        np.testing.assert_allclose(got[row], expected, rtol=1e-5, atol=1e-5)
    others = [v for v in range(VOCAB) if v not in IDS]
    np.testing.assert_array_equal(got[0, others], logits[0, others])
    np.testing.assert_array_equal(got[2], logits[2])
    # Steps of plain adapters compute nothing of it.
    plain = AdapterRouting(jnp.int32(6), jnp.asarray(owners), slots.plain, names, 4)
    same = jnp.asarray(base)
    assert own_embeddings(same, jnp.asarray(given), plain, VOCAB) is same
    assert own_logits(same, same, plain) is same
