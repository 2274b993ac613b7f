"""Example prompts of a model and its adapters, from `examples.json` in their folders. No jax.

    {"prompt": "a text that the base model can go on with",
     "adapters": {"sql": "a question for the adapter sql"},
     "images": {"": ["examples/scene.png"], "flags": ["examples/flag.png"]}}

An adapter's own folder may have one too: {"prompt": "..."}. The demo page shows them in this order,
the ready line the first of an adapter that is served; without the file there are none. `images` are
PNG files below the model's folder that go with the prompt of an adapter, or of the base ("").
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

FILE = "examples.json"
MAX_BYTES = 1 << 16
MAX_LENGTH = 2000  # characters of one example
MAX_IMAGES = 8  # of one example, each of at most MAX_BYTES
BASE = ""  # name of the base among `images`


@dataclasses.dataclass(frozen=True)
class Examples:
    """One prompt for the base, one for each adapter that has one, and files of their images."""

    base: str | None = None
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    images: Mapping[str, tuple[Path, ...]] = dataclasses.field(default_factory=dict)

    def of(self, adapter: str | None) -> tuple[str | None, tuple[Path, ...]]:
        """Return prompt and images for an adapter; None is the base."""
        prompt = self.base if adapter is None else self.adapters.get(adapter)
        return prompt, self.images.get(adapter or BASE, ())


def read_examples(model: str | Path, adapters: Mapping[str, str] | None = None) -> Examples:
    """Return the examples of a model's folder, and of adapters' folders by name over them.

    A file that is missing or is not as described gives none: examples are never worth an error.
    """
    given = _read(Path(model))
    of_model = given.get("adapters")
    prompts = {k: v for k, v in of_model.items() if _good(v)} if isinstance(of_model, dict) else {}
    named = given.get("images")
    images: dict[str, tuple[Path, ...]] = {}
    if isinstance(named, dict):
        images = {name: _files(Path(model), files) for name, files in named.items()}
    for name, path in (adapters or {}).items():
        prompt = _read(Path(path)).get("prompt")
        if _good(prompt):
            prompts[name] = prompt
            images.pop(name, None)
    base = given.get("prompt")
    images = {name: files for name, files in images.items() if files}
    return Examples(base if _good(base) else None, prompts, images)


def _read(folder: Path) -> dict:
    path = folder / FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _files(folder: Path, names: object) -> tuple[Path, ...]:
    """Return the files of one example; none where one is missing, too big or elsewhere."""
    if not isinstance(names, list) or len(names) > MAX_IMAGES:
        return ()
    if not all(isinstance(name, str) and name.endswith(".png") for name in names):
        return ()
    files, top = tuple(folder / name for name in names), folder.resolve()
    try:
        inside = all(file.resolve().is_relative_to(top) for file in files)
        fits = inside and all(0 < file.stat().st_size <= MAX_BYTES for file in files)
    except (OSError, ValueError):
        return ()
    return files if fits else ()


def _good(prompt: object) -> bool:
    return isinstance(prompt, str) and 0 < len(prompt) <= MAX_LENGTH
