"""Names of adapters and of versions: `sql` is an adapter, `sql@v2` a version of it. No jax."""

import re
from collections.abc import Collection

from lora_jax.adapters.registry_errors import AdapterRejected

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NAME = re.compile(_PART)  # of an adapter or of a version
FULL_NAME = re.compile(rf"{_PART}(?:@{_PART})?")  # of what a registry holds


def split(name: str) -> tuple[str, str | None]:
    """Return the adapter and the version of a full name; None: the name has no version."""
    adapter, at, version = name.partition("@")
    return (adapter, version) if at and FULL_NAME.fullmatch(name) else (name, None)


def joined(adapter: str, version: str) -> str:
    """Return the full name of a version."""
    return f"{adapter}@{version}"


def is_of(name: str, adapters: Collection[str]) -> bool:
    """Return whether a full name, or the adapter that it is a version of, is one of `adapters`."""
    return name in adapters or split(name)[0] in adapters


def check_name(name: str) -> None:
    """Raise AdapterRejected unless the registry may hold this name."""
    if not isinstance(name, str):
        raise AdapterRejected(f"The adapter name must be a text, got {type(name).__name__}.")
    if not FULL_NAME.fullmatch(name):
        raise AdapterRejected(
            f"The adapter name {name[:80]!r} is not 1 to 64 letters, digits, '.', '_' or '-' "
            "with a letter or digit first; a version NAME@VERSION has two such parts."
        )
