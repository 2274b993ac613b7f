"""Typed look-ups in a parsed config.json, with errors that name the key."""

from collections.abc import Mapping
from typing import Any

_REQUIRED = object()


class Keys:
    """Typed look-ups in one config dict, with errors that name the key."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """Return the first of `names` that is present and not null."""
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        if default is _REQUIRED:
            raise ValueError(f"{self.where}: config lacks {' or '.join(names)}.")
        return default

    def size(self, *names: str, default: Any = _REQUIRED) -> int:
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.where}: {names[0]} is {value!r}, not a positive integer.")
        return value

    def number(self, *names: str, default: Any = _REQUIRED) -> float:
        """Return the first of these keys that is there; ValueError where it is no number."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ValueError(f"{self.where}: {names[0]} is {value!r}, not a number.")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a key that is true or false. Raises ValueError for any other value."""
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}, not true or false.")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse any value but the allowed ones; absent and null are the first of them."""
        value = self.get(name, default=allowed[0])
        if value not in allowed:
            choices = " or ".join(repr(a) for a in allowed)
            raise ValueError(f"{self.where}: {name} {value!r} is not supported, only {choices}.")

    def section(self, name: str) -> "Keys":
        """Return the keys of an object in this one, none if it is absent; ValueError for others."""
        value = self.get(name, default={})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {name} is {value!r}, not an object.")
        return Keys(value, f"{self.where}: {name}")
