"""Journal of adapters that clients load and unload at run time; the file outlives processes.

Every change is on the disk before it is acknowledged: written beside, synced, renamed. Several
processes may write; each reads, changes and writes under a lock of the file's folder. No jax.
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from lora_jax.adapters.registry import AdapterNotFound
from lora_jax.own_files import write_whole
from serving.adapters import load_attempts, rollouts
from serving.adapters.load_attempts import LoadAttempts

logger = logging.getLogger(__name__)

FILE, LOCK, OWNER = "adapters.json", "adapters.lock", "server.lock"
_PARTS = f".{FILE}.*.part"  # of own_files.write_whole
_DIGEST_LINE = "# sha256 "
FILES = frozenset({FILE, LOCK, OWNER, load_attempts.FILE, rollouts.FILE, rollouts.LOCK})
_FORMAT = 1
_MOST_UNLOADED = 4096  # names; the oldest are forgotten
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An adapter as it was loaded; `path` is below --lora-dir."""

    path: str
    digest: str
    pinned: bool = False


@dataclasses.dataclass(frozen=True)
class Changes:
    """Differences from the flags."""

    loaded: Mapping[str, Loaded] = dataclasses.field(default_factory=dict)
    unloaded: tuple[str, ...] = ()

    def with_loaded(self, name: str, entry: Loaded) -> "Changes":
        """Return the changes after a load."""
        others = {n: e for n, e in self.loaded.items() if n != name}
        return Changes({**others, name: entry}, tuple(n for n in self.unloaded if n != name))

    def with_same(self, name: str, other: "Changes") -> "Changes":
        """Return these changes with one name as `other` has it: loaded, unloaded or not there."""
        loaded = {n: e for n, e in self.loaded.items() if n != name}
        gone = tuple(n for n in self.unloaded if n != name)
        if name in other.loaded:
            loaded[name] = other.loaded[name]
        return Changes(loaded, (*gone, name) if name in other.unloaded else gone)

    def with_unloaded(self, name: str) -> "Changes":
        """Return the changes after an unload."""
        others = {n: e for n, e in self.loaded.items() if n != name}
        gone = (*(n for n in self.unloaded if n != name), name)
        return Changes(others, gone[-_MOST_UNLOADED:])


class Registry(Protocol):
    """Interface of a replay; see lora_jax.adapters.registry.AdapterRegistry."""

    def load(
        self, name: str, path: str, *, replace: bool, pinned: bool, confined: bool, digest: str
    ) -> Any: ...

    def unload(self, name: str) -> Any: ...

    def known(self) -> Any: ...

    def refuse(self, name: str, why: str) -> None: ...


class Journal:
    """The file in one folder."""

    def __init__(self, folder: str | os.PathLike[str], is_lasting: bool = True):
        """Make the folder where there is none. `is_lasting`: it outlives the server.

        Raises ValueError for a folder that others may write, or a file that is no journal.
        """
        self._folder, self.is_lasting = Path(folder), is_lasting
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self._folder.stat()
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o022:
            raise ValueError(
                f"The state folder {self._folder.name} belongs to somebody else or others may "
                "write it; give a folder of your own, with mode 0700."
            )
        self.attempts = LoadAttempts(self._folder)
        self.read()

    @property
    def folder(self) -> Path:
        """The folder, which may hold other state of the server."""
        return self._folder

    def read(self) -> Changes:
        """Return what was recorded. Raises ValueError for a file that is no journal."""
        try:
            text = (self._folder / FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return Changes()
        try:
            return _parse(json.loads(_checked(text)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{self._folder.name}/{FILE} is no journal of adapters ({error}); move it away to "
                "start without what was loaded at run time."
            ) from error

    def loaded(self, name: str, entry: Loaded) -> None:
        """Record a load by request; what is recorded already costs no write. Raises OSError."""
        self.attempts.forget(name, entry.digest)
        self._change(lambda old: old.with_loaded(name, entry))

    @contextlib.contextmanager
    def loading(self, name: str, entry: Loaded) -> Iterator[None]:
        """Record a load by request before the block, which carries it out.

        Where the block fails, the name is recorded as before. Raises OSError.
        """
        self.attempts.forget(name, entry.digest)
        before = self._change(lambda old: old.with_loaded(name, entry))
        try:
            yield
        except BaseException:
            try:
                self._change(lambda now: now.with_same(name, before))
            except (OSError, ValueError) as error:
                logger.error("%s is recorded, but was not loaded: %s", name, error)
            raise

    def unloaded(self, name: str) -> None:
        """Record an unload. Raises OSError."""
        self._change(lambda old: old.with_unloaded(name))

    def put_back(self, name: str, before: Changes) -> None:
        """Record of one name what was recorded before. Raises OSError."""
        entry = before.loaded.get(name)
        self.unloaded(name) if entry is None else self.loaded(name, entry)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Be the only server of the folder. Raises ValueError where there is another."""
        with (self._folder / OWNER).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(
                    f"Another server uses the state folder {self._folder.name}; give each its own."
                ) from None
            yield

    def _change(self, change: Callable[[Changes], Changes]) -> Changes:
        """Record a change, and return what was recorded before it."""
        with (self._folder / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            old = self.read()
            new = change(old)
            if new != old:
                self._write(new)
            return old

    def _write(self, changes: Changes) -> None:
        entries = {name: dataclasses.asdict(entry) for name, entry in changes.loaded.items()}
        content = {"format": _FORMAT, "loaded": entries, "unloaded": list(changes.unloaded)}
        text = json.dumps(content, indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()
        for left in self._folder.glob(_PARTS):  # of a writer that was killed; we hold the lock
            left.unlink(missing_ok=True)
        write_whole(self._folder / FILE, f"{text}\n{_DIGEST_LINE}{digest}\n".encode())


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove the files of a journal that does not last."""
    for name in os.listdir(folder):
        if is_ours(name):
            (Path(folder) / name).unlink(missing_ok=True)


def is_ours(name: str) -> bool:
    """Return whether a file of the folder is the journal's."""
    return name in FILES or fnmatch.fnmatch(name, _PARTS)


def replay(
    changes: Changes, registry: Registry, attempts: LoadAttempts | None = None
) -> dict[str, str]:
    """Bring a registry to what was recorded; return the reasons of what cannot be, by name.

    What ended several processes, as `attempts` knows, is not tried again until it is loaded anew.

    What is there already is left alone, also if its weights have left host memory: an instance that
    serves repeats the journal after every change. A name whose files are gone or are others than
    those that were loaded answers to nobody until it is loaded again, or unloaded; everything else
    is served.
    """
    for name in changes.unloaded:
        with contextlib.suppress(AdapterNotFound):
            registry.unload(name)
    present = {entry.name: entry for entry in registry.known()}
    failures = {}
    for name, wanted in changes.loaded.items():
        entry = present.get(name)
        if entry is not None and (entry.digest, entry.pinned) == (wanted.digest, wanted.pinned):
            continue
        why = _load(registry, name, wanted, attempts)
        if why:
            failures[name] = why
            with contextlib.suppress(AdapterNotFound):
                registry.unload(name)
            registry.refuse(name, f"{why} Load it again, or unload it.")
            logger.error("Adapter %s of the journal is not served: %s", name, why)
    return failures


def _load(registry: Registry, name: str, wanted: Loaded, attempts: LoadAttempts | None) -> str:
    """Return why it cannot be loaded, or nothing."""
    if attempts is not None and attempts.is_quarantined(name, wanted.digest):
        return (
            f"Quarantined: {load_attempts.MOST_ENDS} processes in a row ended while they loaded it."
        )
    tried = contextlib.nullcontext() if attempts is None else attempts.attempt(name, wanted.digest)
    more = {"replace": True, "pinned": wanted.pinned, "confined": True, "digest": wanted.digest}
    try:
        with tried:
            registry.load(name, wanted.path, **more)
    except (KeyError, ValueError, OSError) as error:
        return str(error)
    logger.info("Loaded adapter %s from the journal, sha256 %s.", name, wanted.digest[:12])
    return ""


def _checked(text: str) -> str:
    """Return the JSON in front of the line with its digest, which one of earlier days lacks."""
    content, separator, digest = text.rpartition(f"\n{_DIGEST_LINE}")
    if not separator:
        return text
    if hashlib.sha256(content.encode()).hexdigest() != digest.strip():
        raise ValueError("its digest is another one")
    return content


def _parse(content: Any) -> Changes:
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']!r}, not {_FORMAT}")
    loaded = {name: Loaded(**fields) for name, fields in content["loaded"].items()}
    for name, entry in loaded.items():
        texts = isinstance(entry.path, str) and isinstance(entry.pinned, bool)
        if not texts or not _DIGEST.fullmatch(entry.digest):
            raise ValueError(f"wrong entry of {name[:64]!r}")
    if not all(isinstance(name, str) for name in content["unloaded"]):
        raise ValueError("unloaded must be names")
    return Changes(loaded, tuple(content["unloaded"]))
