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
_PROMPTS = (b'"prompt"', b'"input"')  # of completions, of /classify
_TOKENS = (b'"max_tokens"', b'"max_completion_tokens"', b'"max_output_tokens"')


class Peek(NamedTuple):
    """None stands for what was not found."""

    model: str | None = None
    max_tokens: float | None = None


def peek(body: bytes) -> Peek:
    """Return what the top level of a JSON object says of `model` and `max_tokens`."""
    model, tokens, steps = None, None, _STEPS
    opening = _OPEN.match(body)
    position = opening.end() if opening else len(body)
    while steps > 0 and (key := _KEY.match(body, position)):
        position = key.end()
        if key[1] == b'"model"':
            model = _name(body, position)
        elif key[1] in _TOKENS:
            number = _NUMBER.match(body, position)
            tokens = float(number[0]) if number else None
        if model is not None and tokens is not None:
            break
        position, steps = _skip(body, position, steps - 1)
    return Peek(model, tokens)


def sequences(body: bytes) -> int:
    """Return the sequences that a JSON object asks for, prompts times `n`; at least 1.

    Of a field that stands twice the larger one counts: nobody gains by it.
    """
    prompts, choices, steps = 1, 1, _COUNTED
    opening = _OPEN.match(body)
    position = opening.end() if opening else len(body)
    while steps > 0 and (key := _KEY.match(body, position)):
        position, name = key.end(), _plain(key[1])
        if name == b'"n"' and (number := _NUMBER.match(body, position)):
            choices = max(choices, int(float(number[0])))
        elif name in _PROMPTS and body[position : position + 1] == b"[":
            count, steps = _elements(body, position + 1, steps)
            prompts = max(prompts, count)
        position, steps = _skip(body, position, steps - 1)
    return prompts * choices


def _plain(key: bytes) -> bytes:
    """Return a key without escapes, as JSON may have any letter of it escaped."""
    if b"\\" not in key or len(key) > _LONGEST_NAME:
        return key
    try:
        return json.dumps(json.loads(key)).encode()
    except ValueError:
        return key


def _elements(body: bytes, position: int, steps: int) -> tuple[int, int]:
    """Return the texts and lists of a list that begins here, and the steps that are left."""
    count = 0
    while steps > 0 and (start := _ELEMENT.match(body, position)):
        count, position = count + 1, start.start(1)
        position, steps = _skip(body, position, steps)
    return count, steps


def _name(body: bytes, position: int) -> str | None:
    text = _TEXT.match(body, position, position + _LONGEST_NAME)
    if text is None:
        return None
    try:
        return json.loads(text[0])
    except ValueError:
        return None


def _skip(body: bytes, position: int, steps: int) -> tuple[int, int]:
    """Return the place behind a value and the steps that are left; the end where it is cut off."""
    depth = 0
    while steps > 0:
        steps -= 1
        if body[position : position + 1] == b'"':
            text = _TEXT.match(body, position)
            if text is None:
                return len(body), 0
            position = text.end()
        elif body[position : position + 1] in (b"[", b"{"):
            depth, position = depth + 1, position + 1
        elif body[position : position + 1] in (b"]", b"}") and depth:
            depth, position = depth - 1, position + 1
        elif not depth:
            scalar = _SCALAR.match(body, position)
            return (scalar.end() if scalar else position), steps
        if not depth:
            return position, steps
        match = _NESTED.search(body, position)
        if match is None:
            return len(body), 0
        position = match.start()
    return position, 0
