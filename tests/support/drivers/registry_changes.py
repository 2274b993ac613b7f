"""Changes that a registry tells a loader or residencies when its adapters are others."""

import weakref

_TOLD: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def follow(target, entries) -> None:
    """Tell `target` that these entries, and no others, are loaded now."""
    now = {entry.name: entry for entry in entries}
    gone = [name for name in _TOLD.get(target, ()) if name not in now]
    _TOLD[target] = tuple(now)
    target.follow([*((name, None) for name in gone), *now.items()])
