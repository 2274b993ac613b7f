"""The vocabulary that grammars see is the model's: bytes, special tokens, ends."""

import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from support.cases.grammar_cases import tokenizer, vocabulary

from serving.text.structured.vocabulary import _Tokens


def allowed(matcher):
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_tokens_are_the_bytes_that_they_add_to_a_text():
    ids = tokenizer().encode("größe 🎉 x", add_special_tokens=False)
    data = b"".join(vocabulary().tokens[i] for i in ids)
    assert data.decode() == tokenizer().decode(ids)


def test_a_mask_has_the_tokens_that_continue_some_answer_and_no_others():
    words = vocabulary()
    matcher = LLMatcher(words.tokenizer(), LLMatcher.grammar_from_regex("[a-c]+x"), log_level=0)
    plain = set("abcx")
    want = set()
    for i, token in enumerate(words.tokens):
        text = token.decode("utf-8", "replace")
        body, last = text[:-1], text[-1:]
        if text and set(text) <= plain and "x" not in body and (last != "x" or body):
            want.add(i)
    assert allowed(matcher) == want - set(words.special_ids)


def test_only_ends_follow_a_whole_answer_and_ids_without_text_never_do():
    words = vocabulary()
    matcher = LLMatcher(words.tokenizer(), LLMatcher.grammar_from_regex("a"), log_level=0)
    (only,) = list(allowed(matcher))
    assert words.tokens[only] == b"a"
    matcher.consume_token(only)
    assert allowed(matcher) == set(words.end_ids)
    anything = LLMatcher(words.tokenizer(), LLMatcher.grammar_from_regex("(.|\n)*"), log_level=0)
    assert max(allowed(anything)) < tokenizer().vocab_size


@pytest.mark.parametrize("seed", range(3))
def test_slices_change_no_mask(seed):
    """Every length of a bounded string, by tokens of one and of several characters."""
    tokens, rng = vocabulary(), random.Random(seed)
    plain = LLTokenizer(
        TokenizerWrapper(_Tokens(tokens)),
        n_vocab=len(tokens.tokens),
        eos_token=list(tokens.end_ids),
        slices=[],
    )
    text = LLMatcher.grammar_from_json_schema('{"type": "string", "maxLength": 34}')
    sliced, whole = (LLMatcher(of, text) for of in (tokens.tokenizer(), plain))
    num_masks = 0
    while not sliced.is_stopped():
        mask = sliced.compute_bitmask()
        assert mask == whole.compute_bitmask()
        fits = sorted(allowed(sliced))
        longer = [token for token in fits if b'"' not in tokens.tokens[token]]
        token = rng.choice(longer if num_masks and longer else fits)
        assert sliced.consume_tokens([token])
        assert whole.consume_tokens([token])
        num_masks += 1
    assert num_masks > 8
