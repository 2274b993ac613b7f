"""JSON of files that a stranger wrote: a key that stands twice in an object is an error. No jax.

Which of two values counts differs between parsers: a file that was checked by one would mean
something else to another.
"""

import json
from typing import Any

_LONGEST_NAME = 80


def loads(text: str | bytes) -> Any:
    """Return what json.loads does; ValueError naming the key that stands twice in an object."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice[:_LONGEST_NAME]!r} stands twice; keep one of them.")
    return found
