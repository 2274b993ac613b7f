"""Folders of the cache of Hugging Face's hub: `models--ORG--NAME/snapshots/HASH`. No jax."""

import re
from pathlib import Path

_REPOSITORY = re.compile(r"models--(?:.+?--)?(.+)")
_NAME_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def folder_name(folder: str | Path) -> str:
    """Return the last part of a folder's path, links followed; a snapshot has its repository's."""
    path = Path(folder).resolve()
    repository = _REPOSITORY.fullmatch(path.parent.parent.name)
    if path.parent.name == "snapshots" and repository is not None:
        return repository[1]
    return path.name


def hint(given: str) -> str:
    """Return which folder to give for a repository's folder or for a name on the hub, or ''."""
    path = Path(given)
    if not path.exists():
        if _NAME_ON_THE_HUB.fullmatch(given) is None:
            return ""
        return f"; if it is a name on the hub, `hf download {given}` prints a folder"
    snapshots = path / "snapshots"
    if not snapshots.is_dir():
        return ""
    newest = max(snapshots.iterdir(), key=lambda snapshot: snapshot.stat().st_mtime, default=None)
    return "" if newest is None else f"; give a snapshot of it, such as {newest.absolute()}"
