"""Every token of every document is predicted exactly once, from its own document alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_jax.finetune.documents import Document
from lora_jax.finetune.packing import pack, pieces

sizes = st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))


@given(
    sizes=st.lists(sizes, min_size=1, max_size=12),
    length=st.integers(1, 17),
    answer_only=st.booleans(),
)
def test_each_token_is_predicted_once(sizes, length, answer_only):
    documents = [Document(tuple(range(1, n + 1)), prompt) for n, prompt in sizes]
    rows = pack(documents, length, answer_only=answer_only)
    real = rows.segments >= 0
    # Documents count 1, 2, 3, ..., so a target is always its token plus one.
    np.testing.assert_array_equal(rows.targets[real], rows.tokens[real] + 1)
    assert real.sum() == sum(len(d.tokens) - 1 for d in documents)
    want = sum(len(d.tokens) - max(d.num_prompt if answer_only else 1, 1) for d in documents)
    assert rows.weights.sum() == want
    assert not rows.weights[~real].any()
    for segment in range(rows.segments.max() + 1):
        row, place = np.nonzero(rows.segments == segment)
        assert len(set(row)) == 1
        np.testing.assert_array_equal(place, place[0] + np.arange(len(place)))
        np.testing.assert_array_equal(rows.positions[row, place], np.arange(len(place)))


def test_rows_are_filled_before_new_ones_are_opened():
    documents = [Document(tuple(range(n + 1)), 0) for n in (7, 3, 5, 1)]
    assert pack(documents, 8).num_rows == 2


def test_answer_only_counts_the_tokens_after_the_prompt():
    (tokens, targets, weights), *rest = pieces(Document((5, 6, 7, 8, 9), 2), 3, True)
    assert (tokens, targets, weights) == ([5, 6, 7], [6, 7, 8], [0.0, 1.0, 1.0])
    assert rest == [([8], [9], [1.0])]


def test_take_keeps_the_fields_together():
    rows = pack([Document(tuple(range(9)), 0), Document(tuple(range(7)), 0)], 8)
    some = rows.take(np.array([1, 0, 1]))
    assert some.tokens.shape == (3, 8)
    np.testing.assert_array_equal(some.tokens[0], rows.tokens[1])
    np.testing.assert_array_equal(some.weights[1], rows.weights[0])


def test_documents_of_one_token_are_refused():
    with pytest.raises(ValueError, match="nothing to predict"):
        pack([Document((1,), 0)], 8)
