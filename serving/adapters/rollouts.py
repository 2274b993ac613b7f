"""Rollouts of all adapters: which version a request gets, guards, and the file that keeps them.

Instances of one server share the file: each looks whether it is another one before it chooses a
version, so that a change which is answered holds in all of them. No jax.
"""

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lora_jax.adapters.host_memory.room_line import Ticket, wait_in_line
from lora_jax.adapters.registry import (
    AdapterEntry,
    AdapterNotFound,
    AdapterRegistry,
    AdapterRejected,
    HostShare,
    RegistryBusy,
)
from lora_jax.adapters.versions import NAME, joined, split
from lora_jax.own_files import write_whole
from serving.adapters.rollout import (
    ROLLBACK,
    NoWayBack,
    Rollout,
    bucket_of,
    rolled_back,
    rolled_out,
    rollout_of,
    version_at,
)
from serving.adapters.rollout_guard import Guard, Outcome, Outcomes, broken

logger = logging.getLogger(__name__)

FILE, LOCK = "rollouts.json", "rollouts.lock"
_FORMAT = 1
_MOST_NAMES = 4096
_Change = Callable[[Rollout | None], Rollout | None]


class NoRollout(KeyError):
    """The adapter has no rollout."""

    def __str__(self) -> str:
        return f"The adapter {self.args[0][:64]!r} has no rollout."


class Rollouts:
    """Rollouts by name of the adapter; any thread may call any method."""

    def __init__(self, registry: AdapterRegistry, clock: Callable[[], float] = time.time):
        self._registry, self._clock = registry, clock
        self._lock = threading.RLock()  # of changes and of the file, held while it is written
        self._count_lock = threading.Lock()  # of the counts, held for moments
        self._states: Mapping[str, Rollout] = {}  # replaced as a whole
        # By name and version, with the revision and the digest that they are of.
        self._counts: dict[tuple[str, str], tuple[int, str | None, Outcomes]] = {}
        self._judged: set[tuple[str, int]] = set()  # name and revision that a guard has acted on
        self._folder: Path | None = None
        self._mark: tuple[int, int, int] | None = None  # of the file that was read

    def keep_in(self, folder: str | os.PathLike[str]) -> None:
        """Take what a folder's file says, and keep every change there from now on.

        The folder is made if it is not there. Raises ValueError for a file that holds no rollouts.
        """
        with self._lock:
            self._folder = Path(folder)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._file_lock():
                for part in self._folder.glob(f".{FILE}.*.part"):  # of a writer that was killed
                    part.unlink(missing_ok=True)
            self._look()

    # Requests.

    def pick(self, name: str, key: str) -> str:
        """Return the full name that serves `name` for this user; one with a version is its own."""
        state = self._current().get(name)
        if state is None:
            return name
        return joined(name, version_at(state.now, bucket_of(name, key)))

    def resolve(
        self,
        full_name: str,
        share: HostShare | None = None,
        deadline: float = float("inf"),
        ticket: Ticket | None = None,
    ) -> AdapterEntry:
        """Return what `AdapterRegistry.resolve` does; a version that is not there has failed."""
        try:
            return self._registry.resolve(full_name, share, deadline, ticket)
        except RegistryBusy:
            raise
        except (AdapterNotFound, AdapterRejected):
            self.finished(full_name, Outcome(failed=True))
            raise

    def entry_for(
        self,
        name: str,
        key: str,
        deadline: float = float("inf"),
        *,
        wait_s: float = 0.0,
        lends: bool = True,
    ) -> AdapterEntry:
        """Return what serves `name` for this user; see `pick` and `resolve`.

        Where adapters in use take all host memory it waits for so many seconds at most. With
        `lends` the entry counts as in use for as long as the caller holds it.
        """
        chosen = self.pick(name, key)

        def attempt(ticket: Ticket) -> AdapterEntry:
            return self.resolve(chosen, None, deadline, ticket)

        line = self._registry.line
        return wait_in_line(line, attempt, wait_s, deadline=deadline, lends=lends)

    def check_unload(self, full_name: str) -> None:
        """Raise ValueError for a version that has a share."""
        name, version = split(full_name)
        state = self._current().get(name)
        if state is not None and version in state.now.served:
            share = state.now.buckets[version] / 100
            raise ValueError(
                f"{full_name!r} has {share:g}% of {name!r}; give it to another version first."
            )

    def finished(self, full_name: str | None, outcome: Outcome, digest: str | None = None) -> None:
        """Count the end of a request of a version; where that breaks a guard, it is rolled back.

        `digest` is that of the files that answered: a version that was loaded again in place, with
        others, is counted anew.
        """
        name, version = split(full_name or "")
        state = self._states.get(name)
        if version is None or state is None or version not in state.now.buckets:
            return
        files = self._registry.digest_of(joined(name, version))
        if digest is not None and files is not None and digest != files:
            return  # of files from before
        with self._count_lock:
            revision, counted, seen = self._counts.get((name, version), (0, None, Outcomes()))
            is_same = (revision, counted) == (state.revision, files)
            seen = (seen if is_same else Outcomes()).plus(outcome)
            self._counts[name, version] = state.revision, files, seen
            guard = state.now.guard if version == state.now.newest else None
            why = None if guard is None else broken(guard, seen)
            if why is None or (name, state.revision) in self._judged:
                return
            self._judged = {(n, r) for n, r in self._judged if n != name} | {(name, state.revision)}
        # A file is written: that is not for the thread of the engine.
        decision = (name, state.revision, why)
        threading.Thread(target=self._act, args=decision, name="guard", daemon=True).start()

    # Changes.

    def set(
        self,
        name: str,
        versions: Mapping[str, Any],
        guard: Mapping[str, Any] | Guard | Literal["keep"] | None = "keep",
        request_id: str = "",
    ) -> Rollout:
        """Give versions their shares in percent; versions with a share are read into memory.

        Either all of them have a task head or none.

        `guard` "keep" leaves the guard as it is; None takes it away. Raises ValueError for names,
        versions, shares or a guard that cannot be, what `AdapterRegistry.resolve` raises for a
        version that cannot be read, and OSError where the change cannot be kept. Then nothing has
        changed.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"{name[:64]!r} is no name of an adapter.")
        known = self.versions_of(name)
        now = self._clock()
        options = {"known": known, "guard": guard, "now": now, "request_id": request_id}
        wanted = rolled_out(self._current().get(name), versions, **options)
        self._check_together(name, wanted.now.served)
        return self._changed(name, lambda old: rolled_out(old, versions, **options))

    def _check_together(self, name: str, versions: Iterable[str]) -> None:
        """Read versions that get a share; ValueError where requests for one fail with the other."""
        has, lacks = [], []
        for version in versions:
            report = self._registry.resolve(joined(name, version)).report
            (lacks if report.head is None else has).append(version)
        if has and lacks:
            raise ValueError(
                f"version {has[0]!r} has a task head and {lacks[0]!r} has none: requests for "
                "one fail with the other. Give shares to versions of one kind."
            )

    def roll_back(self, name: str, request_id: str = "") -> Rollout:
        """Take the newest version's users back to older ones; requests under way end on theirs.

        The same `request_id` again changes nothing more. Raises NoRollout, NoWayBack, or OSError
        where the change cannot be kept; then nothing has changed.
        """

        def back(old: Rollout | None) -> Rollout:
            if old is None:
                raise NoRollout(name)
            if request_id and (old.now.request_id, old.now.why) == (request_id, ROLLBACK):
                return old  # not where the shares were set by a request with this id
            options = {"known": self.versions_of(name), "now": self._clock(), "by": request_id}
            return rolled_back(old, **options)

        return self._changed(name, back)

    def end(self, name: str) -> None:
        """Forget a rollout; its name is a plain adapter's again. Raises NoRollout or OSError."""

        def nothing(old: Rollout | None) -> None:
            if old is None:
                raise NoRollout(name)

        self._changed(name, nothing)

    # State.

    def state(self, name: str) -> Rollout:
        """Return a rollout with its history. Raises NoRollout."""
        state = self._current().get(name)
        if state is None:
            raise NoRollout(name)
        return state

    def states(self) -> Mapping[str, Rollout]:
        """Return all rollouts by name of the adapter."""
        return self._current()

    def seen(self, name: str) -> dict[str, Outcomes]:
        """Return what this process has seen of each version's files since the last change."""
        state = self.state(name)
        files = {v: self._registry.digest_of(joined(name, v)) for v in state.now.buckets}
        with self._count_lock:
            counts = {v: self._counts[name, v] for v in files if (name, v) in self._counts}
        return {v: c[2] for v, c in counts.items() if c[:2] == (state.revision, files[v])}

    def lacking(self) -> dict[str, float]:
        """Return the full names of versions that have a share and are not loaded, with percent."""
        known = {entry.name for entry in self._registry.known()}
        shares = {
            joined(name, version): state.now.buckets[version] / 100
            for name, state in self._current().items()
            for version in state.now.served
        }
        return {name: share for name, share in shares.items() if name not in known}

    def versions_of(self, name: str) -> tuple[str, ...]:
        """Return the versions that are loaded."""
        parts = (split(entry.name) for entry in self._registry.known())
        return tuple(version for adapter, version in parts if adapter == name and version)

    def kept(self) -> frozenset[str]:
        """Return full names that should stay in memory: those with a share, and the way back."""
        states = self._states
        served = {joined(name, v) for name, state in states.items() for v in state.now.served}
        back = {joined(name, s.standby) for name, s in states.items() if s.standby is not None}
        return frozenset(served | back)

    # The guard, the file.

    def _act(self, name: str, revision: int, why: str) -> None:
        """Roll back because of a guard, unless the rollout is another one by now."""

        def back(old: Rollout | None) -> Rollout | None:
            if old is None or old.revision != revision:
                return old
            options = {"known": self.versions_of(name), "now": self._clock()}
            return rolled_back(old, why=f"guard: {why}", **options)

        try:
            now = self._changed(name, back, must_keep=False)
        except NoWayBack as error:
            logger.error("Adapter %s: %s, but %s", name, why, error)
        else:
            if now is not None:
                logger.error("Adapter %s is rolled back to %s: %s.", name, now.now.newest, why)

    def _changed(self, name: str, change: _Change, must_keep: bool = True) -> Any:
        """Make a change under the file's lock, keep it, and let it hold; return the new state.

        Unless it `must_keep` the change, a folder that cannot be used is logged.
        """
        with self._lock, self._file_lock(must_keep):
            self._look(must_keep)
            old = self._states.get(name)
            new = change(old)
            if new is old:
                return new
            states = {n: s for n, s in self._states.items() if n != name}
            if new is not None:
                states[name] = new
            if len(states) > max(_MOST_NAMES, len(self._states)):
                raise ValueError(f"There are at most {_MOST_NAMES} rollouts; end one.")
            try:
                self._write(states)
            except OSError as error:
                if must_keep:
                    raise
                logger.error("The rollout of %s is not kept: %s", name, error.strerror)
            self._states = states
            return new

    def _current(self) -> Mapping[str, Rollout]:
        """Return all states, read again where another process has changed the file."""
        if self._folder is not None and self._file_mark() != self._mark:
            with self._lock:
                self._look(must=False)
        return self._states

    def _look(self, must: bool = True) -> None:
        """Read the file if it is another one; unless it `must` be right, a wrong one is logged."""
        if self._folder is None or (mark := self._file_mark()) == self._mark:
            return
        try:
            text = "" if mark is None else (self._folder / FILE).read_text(encoding="utf-8")
            self._states = _parse(json.loads(text)) if text else {}
            with self._count_lock:
                self._judged.clear()  # a rollback that could not be kept is not in the file
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"there is no field {error}" if isinstance(error, KeyError) else error
            wrong = f"{self._folder.name}/{FILE} holds no rollouts ({why}); move it away to "
            wrong += "start without them."
            if must:
                raise ValueError(wrong) from error
            logger.error("%s", wrong)
        self._mark = mark

    def _file_mark(self) -> tuple[int, int, int] | None:
        """Return what tells one file from another one; None where there is none."""
        assert self._folder is not None, "no folder"
        try:
            about = os.stat(self._folder / FILE)
        except FileNotFoundError:
            return None
        return about.st_mtime_ns, about.st_ino, about.st_size

    def _write(self, states: Mapping[str, Rollout]) -> None:
        if self._folder is None:
            return
        content = {"format": _FORMAT, "rollouts": {name: s.as_json() for name, s in states.items()}}
        write_whole(self._folder / FILE, json.dumps(content, indent=1).encode())
        self._mark = self._file_mark()

    @contextlib.contextmanager
    def _file_lock(self, must: bool = True) -> Iterator[None]:
        """Hold the folder against changes by other processes; unless it `must`, as far as it can.

        A file system that has become read-only must not keep a guard from acting.
        """
        with contextlib.ExitStack() as stack:
            if self._folder is not None:
                try:
                    lock = stack.enter_context((self._folder / LOCK).open("ab"))
                    fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
                except OSError as error:
                    if must:
                        raise
                    logger.error("%s/%s: %s", self._folder.name, LOCK, error.strerror)
            yield


def _parse(content: Any) -> dict[str, Rollout]:
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']!r}, not {_FORMAT}")
    if not all(map(NAME.fullmatch, content["rollouts"])):
        raise ValueError("a name that is not allowed")
    return {name: rollout_of(state) for name, state in content["rollouts"].items()}
