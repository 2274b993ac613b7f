"""Perplexity is exp of the mean -ln p of the tokens that count, each counted once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.cases.finetune_cases import CONFIG, VOCAB

from lora_jax.config import from_hf
from lora_jax.finetune.documents import Document
from lora_jax.finetune.forward import forward
from lora_jax.finetune.packing import pack
from lora_jax.finetune.perplexity import BATCH_ROWS, Evaluator, Measured, padded
from lora_jax.models import build

DOCUMENTS = [
    Document(tuple(np.random.default_rng(seed).integers(0, VOCAB, 9).tolist()), seed + 2)
    for seed in range(5)
]


def random_model(scale: float):
    graphdef, state = nnx.split(build(from_hf(CONFIG)), graph=False)
    return nnx.merge(graphdef, jax.tree.map(lambda p: p * scale, state))


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity():
    measured = Evaluator(random_model(0.0), 16).measure(DOCUMENTS)
    assert measured.perplexity == pytest.approx(VOCAB, rel=1e-4)
    assert measured.tokens == sum(len(d.tokens) - 1 for d in DOCUMENTS)


@pytest.mark.parametrize("answer_only", [False, True])
def test_packed_text_measures_as_each_document_alone(answer_only):
    model = random_model(5.0)
    measured = Evaluator(model, 16).measure(DOCUMENTS, answer_only=answer_only)
    nats = 0.0
    for document in DOCUMENTS:
        tokens = jnp.asarray(document.tokens, jnp.int32)[None]
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        logits = forward(model, tokens, places, jnp.zeros_like(tokens)).logits[0]
        scores = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))
        first = document.num_prompt if answer_only else 1
        nats -= sum(scores[t - 1, document.tokens[t]] for t in range(first, len(document.tokens)))
    assert measured.nats == pytest.approx(nats, rel=1e-5)


def test_rows_that_fill_the_last_batch_weigh_nothing():
    text = pack([Document(tuple(range(9)), 0)] * (BATCH_ROWS + 1), 8)
    weights = [float(padded(text, start).weights.sum()) for start in (0, BATCH_ROWS)]
    assert weights == [8.0 * BATCH_ROWS, 8.0]


def test_perplexity_of_a_sum():
    assert Measured(nats=3 * np.log(7.0), tokens=3).perplexity == pytest.approx(7.0)
