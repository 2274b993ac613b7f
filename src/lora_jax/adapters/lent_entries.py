"""Adapters that callers hold between looking up a name and handing in their request. No jax.

The engine says which adapters its requests need. A caller that has an entry and no request yet is
not among them: without a count of its own, the room of its weights would be given away while they
stay in memory.
"""

import collections
import dataclasses
import threading
import weakref

from lora_jax.adapters.entries import AdapterEntry


class LentEntries:
    """Counts entries that callers hold, by digest; any thread may call it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._ends: dict[int, weakref.finalize] = {}  # by id of the copy
        self._returned: collections.deque[str] = collections.deque()  # by any thread, at any time

    def lend(self, entry: AdapterEntry) -> AdapterEntry:
        """Return a copy of the entry, which counts until the last reference to it goes."""
        copy = dataclasses.replace(entry)
        with self._lock:
            self._counts[entry.digest] += 1
        end = weakref.finalize(copy, self._ended, id(copy), entry.digest)
        end.atexit = False
        self._ends[id(copy)] = end
        return copy

    def give_back(self, entry: AdapterEntry) -> None:
        """Count a copy no more; others, and a second call, do nothing."""
        end = self._ends.get(id(entry))
        held = None if end is None else end.peek()
        if end is not None and held is not None and held[0] is entry:
            end()

    def _ended(self, number: int, digest: str) -> None:
        # No lock: the collector may call it in a thread that holds ours.
        self._ends.pop(number, None)
        self._returned.append(digest)

    def digests(self) -> frozenset[str]:
        """Return the adapters that are held now."""
        with self._lock:
            while self._returned:
                digest = self._returned.popleft()
                self._counts[digest] -= 1
                if not self._counts[digest]:
                    del self._counts[digest]
            return frozenset(self._counts)
