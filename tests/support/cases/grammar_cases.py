"""Structures for tests: the shipped model's vocabulary, drawn schemas, and hostile ones."""

import functools
import random
from pathlib import Path
from typing import Any

from serving.text.structured.vocabulary import Vocabulary
from serving.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "assets" / "tiny-moe"


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


@functools.cache
def vocabulary(extra: int = 5) -> Vocabulary:
    """The shipped vocabulary with some ids past its end, as padded models have them."""
    size = tokenizer().vocab_size + extra
    return Vocabulary(
        tokenizer().token_bytes(size), tokenizer().special_ids, tokenizer().eos_token_ids
    )


def drawn_schema(seed: int) -> dict[str, Any]:
    """An object schema of bounded answers: a model of any quality ends them."""
    rng = random.Random(seed)
    return _object(rng, depth=2)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "age", "kind", "tags", "größe", 'a "b"', "x/y"], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["text", "pattern", "format", "integer", "number", "enum", "const", "null", "boolean"]
    kind = rng.choice(kinds + ["array", "object", "any", "one"] * (depth > 0))
    low = rng.randint(-50, 50)
    if kind in ("null", "boolean"):
        return {"type": kind}
    if kind == "array":
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": 1, "maxItems": 2}
    if kind == "object":
        return _object(rng, depth)
    if kind == "any":
        return {"anyOf": [_value(rng, depth - 1), {"type": "null"}]}
    if kind == "one":
        return {"oneOf": [{"const": "left"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
    return {
        "text": {"type": "string", "minLength": 1, "maxLength": 5},
        "pattern": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"},
        "format": {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 900)},
        "number": {"type": "number", "minimum": low, "maximum": low + 10, "multipleOf": 0.5},
        "enum": {"enum": ["red", "grün", 3, None, True]},
        "const": {"const": "fixed"},
    }[kind]
