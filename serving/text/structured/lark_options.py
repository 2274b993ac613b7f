"""Options inside of a client's Lark grammar: which are taken, which are refused by name."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Lexemes of Lark as llguidance reads them, so that an option's name within a text is only text.
# llguidance refuses a text without its end. Here it goes on to the end: a search for one behind
# each escaped quote would take quadratic time.
_LEXEMES = re.compile(
    r"""
    (?:\#|//)[^\n]*                   # comment
    | "(?:\\.|[^"\\\n])*+"?           # string
    | /(?:\\.|[^/\\])++/?             # regex
    | %(?P<statement>llguidance|json)
    | (?P<attribute>\btemperature)[ \t]*=
    """,
    re.VERBOSE | re.DOTALL,
)
# The values of %llguidance's options that may stand: without no_forcing the library would choose
# tokens itself, by a tokenizer that it has not; invalid UTF-8 is no text.
_HARMLESS = {
    "allow_initial_skip": (False, True),
    "allow_invalid_utf8": (False,),
    "no_forcing": (True,),
}
_SPACES = ("whitespace_flexible", "whitespace_pattern")
_BLANKS = re.compile(r"[ \t\r\n]*")


def checked_lark(text: str, json_options: Mapping[str, Any]) -> str:
    """Return a Lark grammar, with `json_options` in each %json that has none of its own.

    ValueError names an option by which an answer would not be valid, that no step can follow, or
    that llguidance passes over.
    """
    pieces, end = [], 0
    for statement, start, value in _options(text):
        if statement == "llguidance":
            _check_settings(value)
        elif "x-guidance" in value:
            _check_own(value["x-guidance"])
        else:
            comma = ", " if value else ""
            pieces += [text[end:start], f'{{"x-guidance": {json.dumps(json_options)}{comma}']
            end = start + 1
    return "".join([*pieces, text[end:]])


def _options(text: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield each %llguidance and %json that has an object: its name, the object's place, it."""
    decoder, end = json.JSONDecoder(parse_int=float), 0  # integers of any length
    while found := _LEXEMES.search(text, end):
        end = found.end()
        if found["attribute"]:
            raise _refused("The attribute temperature is", "the request has one for all tokens")
        statement = found["statement"]
        if statement is None:
            continue
        blanks = _BLANKS.match(text, end)
        start = end if blanks is None else blanks.end()
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            raise _refused(f"%{statement} without JSON is", "an object must follow") from None
        if isinstance(value, dict):  # of other values llguidance says what is wrong
            yield statement, start, value


def _check_settings(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in _HARMLESS or value not in _HARMLESS[name]:
            allowed = "allow_initial_skip may be set"
            raise _refused(f"%llguidance {name[:60]!r}: {json.dumps(value)[:60]} is", allowed)


def _check_own(given: object) -> None:
    if not isinstance(given, Mapping):
        return  # llguidance says what it must be
    for name in given:
        if name not in _SPACES:
            allowed = f"a schema within a grammar may set {' and '.join(_SPACES)}"
            raise _refused(f"x-guidance.{name[:60]} is", allowed)


def _refused(what: str, allowed: str) -> ValueError:
    return ValueError(f"structured_outputs.grammar: {what} not supported; {allowed}.")
