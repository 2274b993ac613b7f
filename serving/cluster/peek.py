"""Bounded scan of a JSON body for the router: the model and the tokens. No jax.

The body is not parsed: nesting costs no recursion, values cost no objects, and a scan ends after a
fixed number of steps. What is not found is left to the instance, which judges the body.
"""

import json
import re
from typing import NamedTuple

_STEPS = 100_000  # keys, strings and brackets that one scan looks at
_COUNTED = 20_000  # the same, where sequences are counted; no request may have so many
_LONGEST_NAME = 256  # bytes of a model's name as JSON
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OPEN = re.compile(rb"\s*+\{")
_KEY = re.compile(rb"[\s,]*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_TEXT = re.compile(_STRING, re.DOTALL)
_NESTED = re.compile(rb'["\[\]{}]')
_SCALAR = re.compile(rb"[^,}]*+")
_NUMBER = re.compile(rb"\d{1,9}(?:\.\d{1,6})?(?=[\s,}])")
_ELEMENT = re.compile(rb"[\s,]*+([\"\[])")
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


def sequences(body: bytes) -> int:
    """Return the sequences that a JSON object asks for, prompts times `n`; at least 1.

    Of a field that stands twice the larger one counts: nobody gains by it.
    """
    prompts, choices, steps = 1, 1, _COUNTED
    found = _OPEN.match(body)
    place = found.end() if found else len(body)
    while steps > 0 and (key := _KEY.match(body, place)):
        place, name = key.end(), _plain(key[1])
        if name == b'"n"' and (number := _NUMBER.match(body, place)):
            choices = max(choices, int(float(number[0])))
        elif name == b'"prompt"' and body[place : place + 1] == b"[":
            count, steps = _elements(body, place + 1, steps)
            prompts = max(prompts, count)
        place, steps = _skip(body, place, steps - 1)
    return prompts * choices


def _plain(key: bytes) -> bytes:
    """Return a key without escapes, as JSON may have any letter of it escaped."""
    if b"\\" not in key or len(key) > _LONGEST_NAME:
        return key
    try:
        return json.dumps(json.loads(key)).encode()
    except ValueError:
        return key


def _elements(body: bytes, place: int, steps: int) -> tuple[int, int]:
    """Return the texts and lists of a list that begins here, and the steps that are left."""
    count = 0
    while steps > 0 and (start := _ELEMENT.match(body, place)):
        count, place = count + 1, start.start(1)
        place, steps = _skip(body, place, steps)
    return count, steps


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
