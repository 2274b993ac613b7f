"""Arguments of Engine that are fields of its configuration. No jax."""

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from serving.api.config import EngineConfig


def config_of(model: str | os.PathLike[str], fields: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration; TypeError naming each argument that is none of its fields."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    unknown = [name for name in fields if name not in names]
    if unknown:
        shown = ", ".join(f"{name!r}{_near(name, names)}" for name in unknown)
        raise TypeError(
            f"Engine has no argument {shown}. docs/how-to/from-vllm-llm.md says what becomes of "
            "those of vllm.LLM, docs/vllm_flags.md of all others."
        )
    return EngineConfig(model=os.fspath(model), **fields)


def adapters_of(given: Any) -> dict[str, str | os.PathLike[str]]:
    """Return the adapters' folders by name; TypeError for what names no folder for each."""
    paths = given.values() if isinstance(given, Mapping) else ()
    named = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    if given is not None and not (named and all(isinstance(p, str | os.PathLike) for p in paths)):
        raise TypeError(
            f'Engine takes adapters as a dict of folders by name, {{"sql": "path/to/sql"}}, not '
            f"{str(given)[:80]}."
        )
    return dict(given or {})


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    return f" (did you mean {near[0]!r}?)" if near else ""
