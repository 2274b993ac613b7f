"""Example prompts of a model and its adapters, from `examples.json` in their folders. No jax.

    {"prompt": "a text that the base model can go on with",
     "adapters": {"sql": "a question for the adapter sql"}}

An adapter's own folder may have one too: {"prompt": "..."}. The demo page shows them in this order,
the ready line the first of an adapter that is served; without the file there are none.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

FILE = "examples.json"
MAX_BYTES = 1 << 16
MAX_LENGTH = 2000  # characters of one example


@dataclasses.dataclass(frozen=True)
class Examples:
    """One prompt for the base, one for each adapter that has one."""

    base: str | None = None
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_examples(model: str | Path, adapters: Mapping[str, str] | None = None) -> Examples:
    """Return the examples of a model's folder, and of adapters' folders by name over them.

    A file that is missing or is not as described gives none: examples are never worth an error.
    """
    given = _read(Path(model))
    of_model = given.get("adapters")
    prompts = {k: v for k, v in of_model.items() if _good(v)} if isinstance(of_model, dict) else {}
    for name, path in (adapters or {}).items():
        prompt = _read(Path(path)).get("prompt")
        if _good(prompt):
            prompts[name] = prompt
    base = given.get("prompt")
    return Examples(base if _good(base) else None, prompts)


def _read(folder: Path) -> dict:
    path = folder / FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _good(prompt: object) -> bool:
    return isinstance(prompt, str) and 0 < len(prompt) <= MAX_LENGTH
