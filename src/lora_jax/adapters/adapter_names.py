"""Names of a registry, and what each stands for: weights in memory, or files to read again. No jax.

The registry's lock guards it.
"""

import dataclasses
from collections.abc import Collection

from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter, RegistryLimits
from lora_jax.adapters.host_memory.room import HostShare
from lora_jax.adapters.host_memory.room_line import Ticket
from lora_jax.adapters.host_memory.tier import HostTier, Staying
from lora_jax.adapters.host_memory.use_ledger import UseLedger
from lora_jax.adapters.registry_errors import AdapterNotFound, RegistryBusy


class AdapterNames:
    """Entries by name, their digests and their uses; the caller holds a lock."""

    def __init__(self, tier: HostTier, ledger: UseLedger, limits: RegistryLimits):
        self._tier, self._ledger, self._most = tier, ledger, limits.max_adapters
        self.entries: dict[str, AdapterEntry] = {}
        self.evicted: dict[str, EvictedAdapter] = {}  # the longest evicted first
        self._num_names: dict[str, int] = {}  # of each digest, evicted or not
        self._num_explicit = 0  # names
        self._changed: dict[str, None] = {}  # names, since somebody asked
        self.generation = 0  # grows with every change of what a name stands for

    def __contains__(self, name: str) -> bool:
        return name in self.entries or name in self.evicted

    def known(self) -> list[AdapterEntry | EvictedAdapter]:
        """Return what every name stands for, in order of name."""
        known = self.evicted | self.entries
        return [known[name] for name in sorted(known)]

    def digest_of(self, name: str) -> str | None:
        """Return the digest of what a name stands for; None: for nothing."""
        known = self.entries.get(name) or self.evicted.get(name)
        return None if known is None else known.digest

    def knows_digest(self, digest: str) -> bool:
        """Return whether a name stands for these weights, evicted or not."""
        return digest in self._num_names

    def take_changes(self) -> list[tuple[str, AdapterEntry | EvictedAdapter | None]]:
        """Return, once, the names that have changed, with what they stand for now."""
        changed, self._changed = self._changed, {}
        return [(name, self.entries.get(name) or self.evicted.get(name)) for name in changed]

    def not_found(self, name: str) -> AdapterNotFound:
        """Return the error of a name that stands for nothing."""
        return AdapterNotFound(name, (*self.entries, *self.evicted))

    def use(self, name: str, ticket: Ticket | None = None) -> AdapterEntry | None:
        """Return what a name stands for in memory, and count a use.

        HostFull with a ticket: the adapter gets no more requests before an earlier one has room.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        self._tier.check_open(entry, ticket)
        self._ledger.used(entry.digest)
        return self._tier.given(entry, ticket)

    def check_not_unloaded(self, known: EvictedAdapter | None) -> None:
        """Raise AdapterNotFound where an operator's name was unloaded while its files were read."""
        if known is not None and known.explicit and known.name not in self:
            raise self.not_found(known.name)

    def stays_without_files(self, known: EvictedAdapter) -> bool:
        """Return whether a name whose folder has gone stays; one that callers used is forgotten."""
        if self.evicted.get(known.name) is not known:
            return False
        if not known.explicit:
            self.forget(known.name)
        return known.explicit

    def check_explicit(self) -> None:
        """Raise RegistryBusy where one more name of the operator's is one too many."""
        if self._num_explicit >= self._most:
            raise self._none_left()

    def make_name(self, name: str, in_use: Collection[str]) -> None:
        """Forget names that callers merely used when there are too many; RegistryBusy: none."""
        if name in self or len(self.entries) + len(self.evicted) < self._most:
            return
        for old in self.evicted.values():
            if not old.explicit:
                self.forget(old.name)
                return
        named = [e for e in self.entries.values() if not (e.explicit or e.pinned)]
        unused = [entry for entry in named if entry.digest not in in_use]
        if not unused:
            raise self._none_left()
        oldest = min(unused, key=lambda entry: self._ledger.last_use(entry.digest))
        self.forget(oldest.name)

    def make_room(
        self,
        new: AdapterEntry | EvictedAdapter,
        share: HostShare,
        stay: Staying,
        ticket: Ticket | None,
    ) -> None:
        """Evict others so that an adapter fits; raises what `HostTier.victims` raises."""
        for name in self._tier.victims(new, share, stay, ticket):
            self._evict(name)

    def put(self, entry: AdapterEntry, owner: str) -> AdapterEntry:
        """Let a name stand for an entry, for which there is room; return it as it is kept."""
        self._note(entry.name)
        entry = dataclasses.replace(entry, generation=self.generation, owner=owner)
        self._num_names[entry.digest] = self._num_names.get(entry.digest, 0) + 1
        self._num_explicit += entry.explicit
        self.forget(entry.name)  # what the name stood for, whose digest may be this one
        self.entries[entry.name] = entry
        self._ledger.used(entry.digest)
        self._tier.copies.add(entry)
        return entry

    def put_evicted(self, entry: AdapterEntry) -> None:
        """Let an unknown name stand for files that were read and found no room."""
        self._note(entry.name)
        self._num_names[entry.digest] = self._num_names.get(entry.digest, 0) + 1
        self._num_explicit += entry.explicit
        self.evicted[entry.name] = entry.evicted(self.generation)

    def forget(self, name: str) -> AdapterEntry | EvictedAdapter | None:
        """Let a name stand for nothing; return what it stood for."""
        entry = self.entries.pop(name, None)
        if entry is not None:
            self._tier.copies.remove(entry)
        known = entry or self.evicted.pop(name, None)
        if known is None:
            return None
        self._note(name)
        self._num_explicit -= known.explicit
        self._num_names[known.digest] -= 1
        if not self._num_names[known.digest]:  # no other name stands for these weights
            del self._num_names[known.digest]
            self._ledger.forget(known.digest)
        return known

    def _none_left(self) -> RegistryBusy:
        return RegistryBusy(f"The limit of adapters is max_adapters={self._most}; unload one.")

    def _note(self, name: str) -> None:
        """Note that a name stands for something else from now on."""
        self.generation += 1
        self._changed[name] = None

    def _evict(self, name: str) -> None:
        """Let the weights of a name go."""
        entry = self.entries.pop(name)
        self._tier.copies.remove(entry)
        self._note(name)
        self.evicted[name] = entry.evicted(self.generation)
        self._ledger.evicted(entry.digest, entry.report.weight_bytes)
