"""Perplexity over pages equals that of the dense training pass."""

import numpy as np
import pytest
from support.cases.finetune_cases import RECORDS, make_folder

from lora_jax.finetune.assets.served import ServedEvaluator, count_answers, rows_to_seqs
from lora_jax.finetune.documents import Document, read_format
from lora_jax.finetune.packing import pack
from lora_jax.finetune.perplexity import Evaluator
from lora_jax.models import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("base") / "tiny", scale=5.0)


def test_both_passes_measure_the_same(folder):
    """Rows of several documents, and a document that is cut into pieces of several pages."""
    model, _ = load(folder, dtype="float32")
    long = Document(tuple(np.random.default_rng(0).integers(3, 250, 70).tolist()), 30)
    documents = [*read_format(folder).documents(RECORDS, "plain"), long]
    found = ServedEvaluator(model, 40).measure(documents)
    dense = Evaluator(model, 40)
    for measured, answer_only in ((found.text, False), (found.answer, True)):
        want = dense.measure(documents, answer_only=answer_only)
        assert measured.tokens == want.tokens
        assert measured.nats == pytest.approx(want.nats, rel=1e-4)
    assert found.answer.tokens < found.text.tokens
    assert found.answers == len(documents) + 1  # one in two pieces
    assert 0 <= found.exact <= found.answers
    assert found.exact <= found.right < found.answer.tokens


def test_pieces_of_a_row_are_numbered_from_0():
    rows = pack([Document((1,) * n, 0) for n in (4, 9, 3)], 8)
    seqs = rows_to_seqs(rows)
    assert seqs.shape == rows.tokens.shape
    want = [[0] * 8, [0] * 3 + [1] * 2 + [-1] * 3]
    np.testing.assert_array_equal(seqs, want)


def test_an_answer_is_exact_when_no_token_of_it_is_wrong():
    segments = np.array([4, 4, 4, 5, 5, 6, 6, -1])
    in_answer = np.array([0, 1, 1, 0, 1, 0, 0, 0], bool)
    right = np.array([0, 1, 0, 0, 1, 1, 0, 1], bool)
    assert count_answers(right, in_answer, segments) == (2, 2, 1)
    assert count_answers(~right, in_answer, segments) == (1, 2, 0)
