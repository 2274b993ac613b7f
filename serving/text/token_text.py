"""Converts tokens to text one token at a time, exact at every step.

The decoder of a tokenizer.json is read as a rule that turns one token into bytes; the bytes of
all tokens in a row are the text in UTF-8. So a character whose bytes are spread over several
tokens is held back until it is whole, and the pieces add up to the text of all tokens at once.
"""

import codecs
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

_KEPT = 1 << 16  # tokens whose bytes are kept, of each rule
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's 256 printable characters that stand for bytes.

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100, U+0101 and so on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_alphabet()
# Latin-1 characters that stand for no byte become one that Latin-1 has not.
_IN_LATIN1 = dict.fromkeys(range(256), 0xFFFF) | {ord(c): b for c, b in _ALPHABET.items()}


@dataclasses.dataclass(frozen=True)
class DecodingRule:
    """Map from tokens to bytes. `strip` spaces are dropped from the very beginning of a text."""

    first: Callable[[str], bytes]  # the first token of a text
    later: Callable[[str], bytes]
    strip: int = 0


def byte_level(token: str) -> bytes:
    """The bytes that a byte-level token stands for; a token in plain text stands for itself."""
    try:
        return token.translate(_IN_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def byte_fallback(token: str) -> bytes:
    """The byte of a token such as <0x0A>, and the text of any other."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode("utf-8", "replace")


def decoding_rule(decoder: dict[str, Any] | None) -> DecodingRule:
    """Return the rule of the `decoder` of a tokenizer.json; ValueError for one not known here."""
    if decoder is None:  # then tokens are words
        return DecodingRule(first=str.encode, later=lambda token: b" " + token.encode())
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    first, later, strip, to_bytes, fused = [], [], 0, str.encode, False
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            to_bytes = byte_level
        elif kind == "ByteFallback":
            to_bytes = byte_fallback
        elif kind == "Fuse":
            fused = True
        elif kind == "Replace" and "String" in step.get("pattern", {}):
            replace = _replacer(step["pattern"]["String"], step["content"])
            first.append(replace)
            later.append(replace)
        elif kind == "Metaspace":
            mark = step.get("replacement", "▁")
            first.append(_replacer(mark, "" if _prepends(step) else " "))
            later.append(_replacer(mark, " "))
        elif kind == "Strip" and fused and step.get("content") == " " and not step.get("stop"):
            strip = step["start"]
        else:
            raise ValueError(f"The tokenizer's decoder has a step that is not supported: {step}.")
    return DecodingRule(_chain(first, to_bytes), _chain(later, to_bytes), strip)


def _prepends(metaspace: dict[str, Any]) -> bool:
    if "prepend_scheme" in metaspace:
        return metaspace["prepend_scheme"] != "never"
    return metaspace.get("add_prefix_space", True)


def _replacer(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new)


def _chain(
    steps: list[Callable[[str], str]], to_bytes: Callable[[str], bytes]
) -> Callable[[str], bytes]:
    @functools.lru_cache(_KEPT)  # the same tokens come again and again
    def run(token: str) -> bytes:
        if to_bytes is byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return byte_fallback(token)
        for step in steps:
            token = step(token)
        return to_bytes(token)

    return run


class TextStream:
    """The text of tokens fed one by one; `at_start` is false where other text comes before."""

    def __init__(self, rule: DecodingRule, *, at_start: bool = True):
        self._rule = rule
        self._is_first = at_start
        self._strip = rule.strip if at_start else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_between(self) -> bool:
        """True between two characters: then the next token's text depends on nothing before it."""
        return not (self._is_first or self._strip or self._utf8.getstate()[0])

    def feed(self, token: str) -> str:
        """Return the text that is certain with this token."""
        data = (self._rule.first if self._is_first else self._rule.later)(token)
        self._is_first = False
        while self._strip and data:
            if data[:1] != b" ":
                self._strip = 0
                break
            data, self._strip = data[1:], self._strip - 1
        return self._utf8.decode(data)

    def close(self) -> str:
        """Return what is left at the end: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)
