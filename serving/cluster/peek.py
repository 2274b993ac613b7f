"""Bounded scan of a JSON body for the router: the model and the tokens. No jax.

The body is not parsed: nesting costs no recursion, values cost no objects, and a scan ends after a
fixed number of steps. What is not found is left to the instance, which judges the body.
"""

import json
import re
from typing import NamedTuple

_STEPS = 100_000  # keys, strings and brackets that one scan looks at
_LONGEST_NAME = 256  # bytes of a model's name as JSON
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OPEN = re.compile(rb"\s*+\{")
_KEY = re.compile(rb"[\s,]*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_TEXT = re.compile(_STRING, re.DOTALL)
_NESTED = re.compile(rb'["\[\]{}]')
_SCALAR = re.compile(rb"[^,}]*+")
_NUMBER = re.compile(rb"\d{1,9}(?:\.\d{1,6})?(?=[\s,}])")
_TOKENS = (b'"max_tokens"', b'"max_completion_tokens"')


class Peek(NamedTuple):
    """None stands for what was not found."""

    model: str | None = None
    max_tokens: float | None = None


def peek(body: bytes) -> Peek:
    """Return what the top level of a JSON object says of `model` and `max_tokens`."""
    model, tokens, steps = None, None, _STEPS
    found = _OPEN.match(body)
    place = found.end() if found else len(body)
    while steps > 0 and (key := _KEY.match(body, place)):
        place = key.end()
        if key[1] == b'"model"':
            model = _name(body, place)
        elif key[1] in _TOKENS:
            number = _NUMBER.match(body, place)
            tokens = float(number[0]) if number else None
        if model is not None and tokens is not None:
            break
        place, steps = _skip(body, place, steps - 1)
    return Peek(model, tokens)


def _name(body: bytes, place: int) -> str | None:
    text = _TEXT.match(body, place, place + _LONGEST_NAME)
    if text is None:
        return None
    try:
        return json.loads(text[0])
    except ValueError:
        return None


def _skip(body: bytes, place: int, steps: int) -> tuple[int, int]:
    """Return the place behind a value and the steps that are left; the end where it is cut off."""
    depth = 0
    while steps > 0:
        steps -= 1
        if body[place : place + 1] == b'"':
            text = _TEXT.match(body, place)
            if text is None:
                return len(body), 0
            place = text.end()
        elif body[place : place + 1] in (b"[", b"{"):
            depth, place = depth + 1, place + 1
        elif body[place : place + 1] in (b"]", b"}") and depth:
            depth, place = depth - 1, place + 1
        elif not depth:
            scalar = _SCALAR.match(body, place)
            return (scalar.end() if scalar else place), steps
        if not depth:
            return place, steps
        found = _NESTED.search(body, place)
        if found is None:
            return len(body), 0
        place = found.start()
    return place, 0
