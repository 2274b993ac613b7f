"""Tokens of bad words, with tokenizers that write spaces each in their way."""

import pytest
from support.cases.tiny_tokenizers import KINDS

from serving.text.bad_words import BadWords
from serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return Tokenizer(KINDS[request.param](tmp_path_factory.mktemp(request.param)))


def test_a_word_is_found_at_the_start_and_after_a_space(tokenizer):
    forms = BadWords(tokenizer.vocab_size).of(tokenizer, ("hello", " the"))
    texts = {tokenizer.decode(form).strip() for form in forms}
    assert texts == {"hello", "the"}
    for word in ("hello", "the"):
        assert tuple(tokenizer.encode(word, add_special_tokens=False)) in forms
        assert tuple(tokenizer.encode(" " + word, add_special_tokens=False)) in forms
    assert BadWords(tokenizer.vocab_size).of(tokenizer, ()) == ()


def test_a_word_that_cannot_be_barred_is_refused_by_name(tokenizer):
    with pytest.raises(ValueError, match="bad_words must have 1 to 16 tokens"):
        BadWords(tokenizer.vocab_size).of(tokenizer, ("qzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqz",))
    with pytest.raises(ValueError, match="bad_words: the model has no token"):
        BadWords(1).of(tokenizer, ("hello",))
