"""Adapters by name: validated before they are published, replaced as a whole, confined. No jax.

An entry never changes: a reload makes a new entry with a higher generation, and requests that
hold the old entry finish on its weights. Caches key on `digest`, so that weights decide, not names.

When host memory is short, weights that nobody uses are evicted. Their names and digests stay: the
next use reads the folder again, and refuses files that have changed.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lora_jax.adapters import reader
from lora_jax.adapters.adapter_folders import AdapterFolders
from lora_jax.adapters.adapter_names import AdapterNames
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter, RegistryLimits
from lora_jax.adapters.host_memory.copies import HeldRoom
from lora_jax.adapters.host_memory.load_rate import LoadRate
from lora_jax.adapters.host_memory.read_failures import ReadFailures
from lora_jax.adapters.host_memory.read_turns import ReadTurns
from lora_jax.adapters.host_memory.room import HostShare
from lora_jax.adapters.host_memory.room_line import Ticket
from lora_jax.adapters.host_memory.tier import HostTier
from lora_jax.adapters.host_memory.use_ledger import UseLedger
from lora_jax.adapters.registry_errors import (
    AdapterExists,
    AdapterNotFound,
    AdapterRejected,
    HostFull,
    RegistryBusy,
    files_changed,
    files_gone,
)
from lora_jax.adapters.versions import NAME, check_name, is_of
from lora_jax.adapters.weights import AnyWeights

__all__ = ["AdapterEntry", "AdapterExists", "AdapterNotFound", "AdapterRegistry", "AdapterRejected"]
__all__ += ["EvictedAdapter", "HostFull", "HostShare", "Recorded", "RegistryBusy", "RegistryLimits"]

Recorded = Callable[[AdapterEntry], contextlib.AbstractContextManager[object]]

_READERS = 16  # folders of the operator's that are read side by side, at most


class AdapterRegistry:
    """Names to adapters; any thread may call it. Look-ups never wait for reads."""

    def __init__(
        self,
        catalogue: LoraCatalogue,
        *,
        base_names: tuple[str, ...] = (),
        lora_dir: str | os.PathLike[str] | None = None,
        limits: RegistryLimits | None = None,
        check: Callable[[AnyWeights], None] | None = None,
        keep: Callable[[AnyWeights], AnyWeights] | None = None,
        read: Callable[..., AnyWeights] = reader.read,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`base_names` are reserved (the served base model); `lora_dir` is the root for clients.

        `check` raises ValueError for adapters that can never run, such as one too big for the
        device (AbstractAllocator.check_fits). `keep` returns what of an adapter stays here, and
        what `check` and the limits are asked about. `read` is reader.read or another of its kind.
        """
        self._base_names = base_names
        self.limits = limits or RegistryLimits()
        root = Path(lora_dir) if lora_dir is not None else None
        sources = catalogue, base_names, root, self.limits
        self._folders = AdapterFolders(*sources, check=check, keep=keep, read=read)
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields below, held for moments
        self._loading = threading.RLock()  # one explicit load at a time
        self._turns = ReadTurns()  # of names, held while files are read
        self._ledger = UseLedger()
        self._tier = HostTier(self._ledger, self.limits, clock)
        self.line = self._tier.line  # of requests that wait for room
        self._names = AdapterNames(self._tier, self._ledger, self.limits)
        self._rate = LoadRate(self.limits.loads_per_minute, clock)
        self._failures = ReadFailures(self.limits.max_adapters, clock)
        self.refused: dict[str, str] = {}  # why, by name; until it is loaded or unloaded

    def set_in_use(self, in_use: Callable[[], Collection[str]]) -> None:
        """Ask `in_use` for the digests that live requests need, which are never evicted."""
        self._tier.set_in_use(in_use)

    def set_kept(self, kept: Callable[[], Collection[str]]) -> None:
        """Ask `kept` for the names that are evicted only when no other ones are left."""
        self._tier.set_kept(kept)

    def load(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        pinned: bool = False,
        confined: bool = True,
        digest: str | None = None,
        recorded: Recorded = contextlib.nullcontext,
    ) -> AdapterEntry:
        """Read, check and publish an adapter; on any error the old entry of the name stays.

        It is published inside of `recorded(entry)`, whose error is one of those.

        `digest` repeats a load of these very files: others are refused.
        With `confined` (every path that came over the network) the path is relative to lora_dir
        and must stay inside it, links included; the operator's own paths pass confined=False. What
        is confined and no repetition counts in the limit of loads in a minute.
        Raises AdapterRejected, AdapterExists, or AdapterNotFound when there is no such folder.
        """
        self._check_name(name)
        with self._loading, self._turns.turn(name):
            self._check_free(name, replace)
            folder = self._folders.folder(path, confined)
            limited = digest is None and confined
            given = {"digest": digest or "", "limited": limited, "recorded": recorded}
            return self._read_in(name, folder, confined, pinned=pinned, **given)

    def load_all(
        self, paths: Mapping[str, str | os.PathLike[str]], pinned: Collection[str] = ()
    ) -> None:
        """Read and publish the operator's own folders, some side by side, in the order given.

        The names of `pinned` stay on the device. Raises what `load` raises for the first that is
        not acceptable; those before it stay. The limit of loads in a minute is for what comes over
        the network.
        """
        with self._loading, ThreadPoolExecutor(_READERS) as pool:
            for names in itertools.batched(paths, _READERS):
                for name in names:
                    self._check_name(name)
                folders = [Path(paths[name]) for name in names]
                read = pool.map(
                    lambda name, folder: self._read(name, folder, False), names, folders
                )
                for name, folder, weights in zip(names, folders, read, strict=True):
                    self._check_free(name, replace=False)
                    stays = name in pinned
                    self._publish(self._folders.entry(name, weights, folder, False, stays))

    def unload(self, name: str) -> AdapterEntry | EvictedAdapter | None:
        """Remove the name; return what it stood for, None for a refused one, or AdapterNotFound."""
        with self._lock:
            was_refused = self.refused.pop(name, None) is not None
            entry = self._names.forget(name)
            if entry is None and not was_refused:
                raise self._names.not_found(name)
            self._failures.forget(name)  # which may ask for just that
        self.line.changed()
        return entry

    def refuse(self, name: str, why: str) -> None:
        """Let `resolve` raise AdapterRejected for this name until it is loaded or unloaded."""
        with self._lock:
            self.refused[name] = why

    def get(self, name: str) -> AdapterEntry:
        """Return the entry of a name in memory; raises AdapterNotFound listing the known names."""
        with self._lock:
            if (entry := self._names.use(name)) is None:
                raise self._names.not_found(name)
            return entry

    def take_read(self, digest: str) -> bool:
        """Return whether these weights were read since this was last asked."""
        with self._lock:
            return self._ledger.take_read(digest)

    def find(self, name: str, ticket: Ticket) -> AdapterEntry | None:
        """Return what `resolve` does where that reads nothing and need not wait, else None."""
        with self._lock:
            try:
                return self._names.use(name, ticket)
            except HostFull:
                return None

    def resolve(
        self,
        name: str,
        share: HostShare | None = None,
        deadline: float = float("inf"),
        ticket: Ticket | None = None,
    ) -> AdapterEntry:
        """Return the entry, reading its folder, or `lora_dir/name` on first use, if need be.

        `share` is the limit of the caller that names it; the earliest `deadline` is read first.
        With a `ticket` of `line` it is asked for again when the ticket is woken after HostFull: the
        adapters in use leave no room now, or earlier requests wait for room.
        Raises AdapterNotFound; RegistryBusy when there is no room now; AdapterRejected, for some
        seconds without reading the folder again.
        """
        with self._lock:
            if (entry := self._names.use(name, ticket)) is not None:
                return entry
            if name in self.refused:
                raise AdapterRejected(self.refused[name])
            on_use = self._folders.has_root and NAME.fullmatch(name)
            if name not in self._names.evicted and (not on_use or name in self._base_names):
                raise self._names.not_found(name)
            if name in self._names.evicted:  # others may not be there at all
                self._tier.take_turn(name, ticket)
        with self._turns.turn(name, deadline):
            with self._lock:
                if (entry := self._names.use(name, ticket)) is not None:
                    return entry  # another thread has loaded it meanwhile
                before = self._names.evicted.get(name)
            if before is None and not self._folders.has(name):
                return self.get(name)  # which raises, mostly
            self._failures.check(name)
            try:
                return self._read_on_use(name, before, share, ticket)
            except HostFull:
                raise
            except AdapterRejected as error:
                self._failures.remember(name, error)
                raise

    def handed_in(self, entry: AdapterEntry) -> None:
        """A live request needs the entry's weights from now on, which `in_use` says."""
        self._tier.handed_in(entry)

    def entries(self) -> tuple[AdapterEntry, ...]:
        """Return all entries whose weights are in memory, in order of name."""
        with self._lock:
            entries = self._names.entries
            return tuple(entries[name] for name in sorted(entries))

    def known(self) -> tuple[AdapterEntry | EvictedAdapter, ...]:
        """Return what every name stands for, in order of name, evicted ones included."""
        with self._lock:
            return tuple(self._names.known())

    def take_changes(self) -> list[tuple[str, AdapterEntry | EvictedAdapter | None]]:
        """Return, once, the names that were published, evicted or removed since the last call.

        Beside each is what the name stands for now, None: nothing. One caller follows a registry.
        """
        with self._lock:
            return self._names.take_changes()

    def knows(self, name: str) -> bool:
        """Return whether the name stands for an adapter, evicted or not."""
        with self._lock:
            return name in self._names

    def digest_of(self, name: str) -> str | None:
        """Return the digest of what the name stands for, evicted or not; None: for nothing."""
        with self._lock:
            return self._names.digest_of(name)

    def knows_digest(self, digest: str) -> bool:
        """Return whether a name stands for these weights, evicted or not."""
        with self._lock:
            return self._names.knows_digest(digest)

    @property
    def generation(self) -> int:
        """Return a number that grows with every change of what a name stands for."""
        return self._names.generation

    def _check_name(self, name: str) -> None:
        check_name(name)
        if is_of(name, self._base_names):
            raise AdapterRejected(f"The name {name!r} is the base model's, or a version of it.")

    def _check_free(self, name: str, replace: bool) -> None:
        with self._lock:
            taken = name in self._names
            if taken and not replace:
                raise AdapterExists(f"The adapter {name!r} is loaded already.")
            if not taken:
                self._names.check_explicit()

    def _read_on_use(
        self,
        name: str,
        before: EvictedAdapter | None,
        share: HostShare | None,
        ticket: Ticket | None,
    ) -> AdapterEntry:
        """Read `lora_dir/name`, or again what was evicted, for which room is made first."""
        if before is None:
            with self._lock:
                self._tier.take_turn(name, ticket)
            folder = self._folders.folder(name, True)
            options = {"explicit": False, "share": share, "ticket": ticket}
            return self._read_in(name, folder, True, **options)
        share = None if before.explicit else share  # no caller's limit counts it
        options = {"explicit": before.explicit, "share": share, "known": before}
        options |= {"digest": before.digest, "limited": not before.explicit, "ticket": ticket}
        held = self._hold_room(before, share, ticket)
        try:
            return self._read_in(name, Path(before.folder), before.confined, **options, held=held)
        except AdapterNotFound:
            with self._lock:
                if self._names.stays_without_files(before):
                    raise files_gone(name) from None
            raise
        finally:
            with self._lock:
                self._tier.copies.give_back(held)
            self.line.changed()

    def _hold_room(
        self, known: EvictedAdapter, share: HostShare | None, ticket: Ticket | None
    ) -> HeldRoom:
        """Evict others so that an adapter has room, and hold it while its files are read."""
        stay = self._tier.staying()
        with self._lock:
            self._tier.take_turn(known.name, ticket)
            self._names.make_room(known, share or HostShare(), stay, ticket)
            held = self._tier.copies.hold(known)
        if ticket is not None:
            self.line.leave(ticket)
        return held

    def _read_in(
        self,
        name: str,
        folder: Path,
        confined: bool,
        *,
        pinned: bool = False,
        explicit: bool = True,
        share: HostShare | None = None,
        digest: str = "",
        limited: bool = True,
        ticket: Ticket | None = None,
        held: HeldRoom | None = None,
        known: EvictedAdapter | None = None,
        recorded: Recorded = contextlib.nullcontext,
    ) -> AdapterEntry:
        """Read, check and publish; a `digest` is the only one that is accepted.

        `held` is the room for it, which is given back as it is published. `known` is what the name
        stands for, if its weights left host memory.
        """
        if limited:
            with self._lock:
                self._rate.take()
        weights = self._read(name, folder, confined)
        if digest and weights.digest != digest:
            raise files_changed(name)
        entry = self._folders.entry(name, weights, folder, confined, pinned, explicit, known)
        with recorded(entry):
            return self._publish(entry, share, ticket, held, known)

    def _read(self, name: str, folder: Path, confined: bool) -> AnyWeights:
        try:
            return self._folders.read(name, folder, confined, self._note_read)
        except FileNotFoundError as error:
            names = tuple(entry.name for entry in self.known())
            raise AdapterNotFound(name, names, str(error)) from None

    def _note_read(self, weights: AnyWeights) -> None:
        with self._lock:
            self._ledger.read(weights.digest)

    def _publish(
        self,
        entry: AdapterEntry,
        share: HostShare | None = None,
        ticket: Ticket | None = None,
        held: HeldRoom | None = None,
        known: EvictedAdapter | None = None,
    ) -> AdapterEntry:
        """Make room for the entry and put it in place as the last act; return what is there."""
        owner, stay = share.owner if share else "", self._tier.staying()
        with self._lock:
            if held is not None:
                self._tier.copies.give_back(held)
            self._names.check_not_unloaded(known)
            self._names.make_name(entry.name, stay.in_use)
            try:
                self._names.make_room(entry, share or HostShare(), stay, ticket)
            except HostFull:
                if ticket is not None and entry.name not in self._names:
                    self._names.put_evicted(entry)  # it has room before it is read again
                raise
            entry = self._names.put(entry, owner)
            self.refused.pop(entry.name, None)
            self._failures.forget(entry.name)
            given = self._tier.given(entry, ticket)
        self.line.arrived(entry.name)
        return given
