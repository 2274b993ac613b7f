"""Tokens of the words that an answer must never complete. No jax."""

import functools

from serving.api.sampling import MAX_BAD_WORD_TOKENS
from serving.text.tokenizer import Tokenizer

_KEPT = 256  # lists of words whose tokens are remembered


class BadWords:
    """Finds the tokens of words; any thread may ask."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._of = functools.lru_cache(_KEPT)(self._find)

    def of(self, tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, as it starts a text and as it follows a space.

        ValueError for a word of no tokens, of too many, or of one that the model does not have.
        """
        return self._of(tokenizer, words) if words else ()

    def _find(self, tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        forms = (form for word in words for form in (word.lstrip(), " " + word.lstrip()))
        return tuple(dict.fromkeys(self._tokens(tokenizer, form) for form in forms))

    def _tokens(self, tokenizer: Tokenizer, form: str) -> tuple[int, ...]:
        ids = tuple(tokenizer.encode(form, add_special_tokens=False))
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens each, got {len(ids)}: "
                f"{form!r}."
            )
        if max(ids) >= self._vocab_size:
            raise ValueError(f"bad_words: the model has no token {max(ids)}, of {form!r}.")
        return ids
