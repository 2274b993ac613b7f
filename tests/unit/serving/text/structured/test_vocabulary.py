"""The vocabulary that grammars see is the model's: bytes, special tokens, ends."""

import numpy as np
from llguidance import LLMatcher
from support.cases.grammar_cases import tokenizer, vocabulary


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
