"""Options inside of a client's Lark grammar: which are taken, which are refused by name."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from serving.text.structured.real_dates import with_real_dates

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
    """Return a Lark grammar whose %json have `json_options`, but for spaces of their own.

    ValueError names an option by which an answer would not be valid, that no step can follow, or
    that llguidance passes over.
    """
    pieces, done = [], 0
    for statement, start, end, value in _options(text):
        if statement == "llguidance":
            _check_settings(value)
            continue
        own = _checked_own(value.get("x-guidance", {}))
        schema = {**with_real_dates(value), "x-guidance": {**json_options, **own}}
        pieces += [text[done:start], json.dumps(schema)]
        done = end
    return "".join([*pieces, text[done:]])


def _options(text: str) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Yield each %llguidance and %json that has an object: its name, the object's place, it."""
    decoder, end = json.JSONDecoder(), 0
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
            yield statement, start, end, value


def _check_settings(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in _HARMLESS or value not in _HARMLESS[name]:
            allowed = "allow_initial_skip may be set"
            raise _refused(f"%llguidance {name[:60]!r}: {json.dumps(value)[:60]} is", allowed)


def _checked_own(given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise _refused("x-guidance that is no object is", f"it may have {' and '.join(_SPACES)}")
    for name in given:
        if name not in _SPACES:
            allowed = f"a schema within a grammar may set {' and '.join(_SPACES)}"
            raise _refused(f"x-guidance.{name[:60]} is", allowed)
    return given


def _refused(what: str, allowed: str) -> ValueError:
    return ValueError(f"structured_outputs.grammar: {what} not supported; {allowed}.")
