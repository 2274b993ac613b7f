"""JSON of files that a stranger wrote: a key that stands twice in an object is an error. No jax.

Which of two values counts differs between parsers: a file that was checked by one would mean
something else to another.
"""

import json
from typing import Any

from lora_jax.json_structure import too_many_values

_LONGEST_NAME = 80


def loads(text: str | bytes) -> Any:
    """Return what json.loads does; ValueError naming the key that stands twice in an object."""
    return json.loads(text, object_pairs_hook=_unique)


def read_object(data: bytes, most: int) -> dict[str, Any]:
    """Return the object that a file holds, of at most `most` JSON values.

    ValueError for more, for what is not a JSON object, and for a key that stands twice.
    """
    if too_many_values(data, most):
        raise ValueError(f"it holds more than {most} JSON values.")
    try:
        value = loads(data.decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("not valid JSON.") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice[:_LONGEST_NAME]!r} stands twice; keep one of them.")
    return unique
