"""The end of a process that a signal asks for before a server handles it."""

from typing import Any


def leave(*_: Any) -> None:
    """End this process in order, as the handler of a signal: what was begun is undone."""
    raise SystemExit(0)
