"""A tokenizer as llguidance has it: the bytes of every token, and which tokens end a text."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serving.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer


# Tokens that stand in a JSON string as they are, by their greatest length: where a string may go on
# for so many characters, all of them fit at once, and only longer ones are looked at one by one.
# With llguidance's own lengths, 10 and 30, a mask within 10 characters of a maxLength takes 3 ms
# and more for 150,000 tokens.
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 30)
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{length}}}" for length in _LENGTHS),
    f"{_IN_STRING}+",
]


def has_llguidance() -> bool:
    """Return whether the library is installed; a server without structured outputs runs without."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens of a model by id; ids without a text have no bytes and are never allowed."""

    tokens: Sequence[bytes]  # one per logit
    special_ids: Sequence[int]
    end_ids: Sequence[int]  # at least one

    def tokenizer(self) -> "LLTokenizer":
        """Return llguidance's tokenizer: a trie over the tokens, made once."""
        from llguidance import LLTokenizer, TokenizerWrapper

        wrapper = TokenizerWrapper(_Tokens(self))
        sizes = {"n_vocab": len(self.tokens), "eos_token": list(self.end_ids)}
        return LLTokenizer(wrapper, **sizes, slices=SLICES)


def vocabulary_of(tokenizer: Tokenizer, size: int, end_ids: Sequence[int]) -> Vocabulary | None:
    """Return the vocabulary of a model with `size` logits; None for one without an end token."""
    ends = [token for token in end_ids if token < size]
    if not ends:
        return None
    special = [token for token in tokenizer.special_ids if token < size]
    return Vocabulary(tokenizer.token_bytes(size), special, ends)


class _Tokens:
    """The calls that llguidance makes to a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.tokens = list(vocabulary.tokens)
        self.eos_token_id = vocabulary.end_ids[0]
        self.special_token_ids = list(vocabulary.special_ids)
        self._by_byte = {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Return some tokens of a text: llguidance asks for those of texts that it forces.

        No grammar forces any (see grammar_text), so bytes will do.
        """
        return [self._by_byte[byte] for byte in text if byte in self._by_byte]


def parser_limits() -> "LLParserLimits":
    """Return the bounds of a grammar and of each mask.

    llguidance counts fuel, 14,000 to 50,000 units a millisecond, and states of 1 to 2 kB.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=1 << 15,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
