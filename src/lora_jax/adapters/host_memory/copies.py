"""Copies of adapters in host memory, in an order of value that a miss need not sort. No jax.

`room` says what is evicted, and looks at every copy for it. Here a heap has the order.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator

from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter, RegistryLimits
from lora_jax.adapters.host_memory.room import HostShare, copies_of, make_room, no_room, too_large
from lora_jax.adapters.host_memory.use_ledger import UseLedger

_SPARE = 64  # entries of the heap that stand for nothing, beside as many as there are copies


@dataclasses.dataclass(eq=False)
class _Copy:
    """Weights of one digest, and the entries of the names that stand for them."""

    num_bytes: int
    entries: dict[str, AdapterEntry]  # by name

    def others(self, name: str) -> Iterator[AdapterEntry]:
        """Yield the entries of other names than this one."""
        return (entry for entry in self.entries.values() if entry.name != name)


@dataclasses.dataclass(eq=False)
class HeldRoom:
    """Room for a copy that is being read: its bytes, and 1, or 0 for none."""

    num_bytes: int = 0
    count: int = 0


class HostCopies:
    """The entries whose weights are in memory, by digest; the caller holds a lock."""

    def __init__(self, ledger: UseLedger):
        self._ledger = ledger
        self._copies: dict[str, _Copy] = {}
        self._digests: dict[str, str] = {}  # by name
        self._num_bytes = 0
        self._held = HeldRoom()  # of all reads that have room already
        # Value and last use as they were; they only grow, until counts are halved. One entry for
        # each copy, and some of copies that are gone.
        self._heap: list[tuple[float, int, int, str, _Copy]] = []
        self._numbers = itertools.count()
        self._halvings = ledger.num_halvings

    def add(self, entry: AdapterEntry) -> None:
        """Note that a name, which stood for nothing in memory, stands for these weights."""
        copy = self._copies.get(entry.digest)
        if copy is None:
            copy = self._copies[entry.digest] = _Copy(entry.report.weight_bytes, {})
            self._num_bytes += copy.num_bytes
            self._push(entry.digest, copy)
            if len(self._heap) > 2 * len(self._copies) + _SPARE:
                self._sort()
        copy.entries[entry.name] = entry
        self._digests[entry.name] = entry.digest

    def remove(self, entry: AdapterEntry) -> None:
        """Note that the entry's name does not stand for weights in memory any more."""
        copy = self._copies[entry.digest]
        del copy.entries[entry.name], self._digests[entry.name]
        if not copy.entries:
            del self._copies[entry.digest]
            self._num_bytes -= copy.num_bytes

    def hold(self, new: AdapterEntry | EvictedAdapter) -> HeldRoom:
        """Keep the room that `make_room` found for what is read next, until `give_back`."""
        held = HeldRoom() if self._stays(new) else HeldRoom(new.report.weight_bytes, 1)
        self._held.num_bytes += held.num_bytes
        self._held.count += held.count
        return held

    def give_back(self, held: HeldRoom) -> None:
        """Let go of held room; a second call does nothing."""
        self._held.num_bytes -= held.num_bytes
        self._held.count -= held.count
        held.num_bytes = held.count = 0

    @property
    def holds_room(self) -> bool:
        """True if adapters are being read that have room already."""
        return self._held.count > 0

    def names(self, digests: Iterable[str]) -> list[str]:
        """Return the names that stand for some of the copies."""
        return [name for digest in digests for name in self._copies[digest].entries]

    def make_room(
        self,
        new: AdapterEntry | EvictedAdapter,
        share: HostShare,
        limits: RegistryLimits,
        in_use: Collection[str],
        kept: Collection[str],
    ) -> set[str]:
        """Return the digests to evict so that an entry fits, as `room.make_room` does.

        `in_use` are digests that stay, `kept` names that are evicted last. What the new entry's
        name stands for now does not count.
        """
        size = 0 if self._stays(new) else new.report.weight_bytes
        most = limits.max_total_bytes
        if share.max_adapters is not None or share.max_bytes is not None:
            others = [e for copy in self._copies.values() for e in copy.others(new.name)]
            copies = copies_of(others, new.digest, in_use, self._ledger, kept)
            held = self._held.num_bytes, self._held.count
            most_copies = limits.max_in_memory
            return make_room(copies, size, share, most, max_count=most_copies, held=held)
        if size > most:
            raise too_large(size, "max_total_adapter_bytes", most)
        own = self._only_for(new.name)
        num_bytes = self._num_bytes - (own.num_bytes if own else 0) + size - most
        num_bytes += self._held.num_bytes
        count = 0
        if limits.max_in_memory is not None:
            count = len(self._copies) - (own is not None) + (size > 0) - limits.max_in_memory
            count += self._held.count
        if num_bytes <= 0 and count <= 0:
            return set()
        fixed = {*in_use, new.digest, self._digests[new.name] if own else new.digest}
        return self._least_valuable(num_bytes, count, new.name, fixed, kept)

    def _stays(self, new: AdapterEntry | EvictedAdapter) -> bool:
        """Return whether another name stands for the same weights."""
        copy = self._copies.get(new.digest)
        return copy is not None and any(True for _ in copy.others(new.name))

    def _only_for(self, name: str) -> _Copy | None:
        """Return the copy that this name stands for and no other; None: there is none."""
        copy = self._copies.get(self._digests.get(name, ""))
        return copy if copy is not None and len(copy.entries) == 1 else None

    def _least_valuable(
        self,
        num_bytes: int,
        count: int,
        name: str,
        fixed: Collection[str],
        kept: Collection[str],
    ) -> set[str]:
        """Return the least valuable copies that have so many bytes, and are so many.

        None are `fixed` or pinned by another name than this one.
        """
        if self._halvings != self._ledger.num_halvings:
            self._sort()
        gone: set[str] = set()
        stay: list[tuple[str, _Copy]] = []  # taken out of the heap
        last: list[tuple[str, _Copy]] = []  # likewise, and evicted if the others are not enough
        while self._heap and (num_bytes > 0 or count > 0):
            found = self._pop()
            if found is None:
                continue
            digest, copy = found
            if digest in fixed or any(entry.pinned for entry in copy.others(name)):
                stay.append((digest, copy))
            elif any(entry.name in kept for entry in copy.others(name)):
                last.append((digest, copy))
            else:
                gone.add(digest)
                stay.append((digest, copy))  # until its entries are removed
                num_bytes, count = num_bytes - copy.num_bytes, count - 1
        for digest, copy in last:
            if num_bytes > 0 or count > 0:
                gone.add(digest)
                num_bytes, count = num_bytes - copy.num_bytes, count - 1
        for digest, copy in (*stay, *last):
            self._push(digest, copy)
        if num_bytes > 0 or count > 0:
            raise no_room()
        return gone

    def _sort(self) -> None:
        """Make the heap anew: values have become less, or most of its entries stand for nothing."""
        self._heap, self._halvings = [], self._ledger.num_halvings
        for digest, copy in self._copies.items():
            self._push(digest, copy)

    def _push(self, digest: str, copy: _Copy) -> None:
        order = self._order(digest, copy)
        heapq.heappush(self._heap, (*order, next(self._numbers), digest, copy))

    def _pop(self) -> tuple[str, _Copy] | None:
        """Take out the first entry; return its copy if that is the least valuable one in there."""
        value, last_use, _, digest, copy = heapq.heappop(self._heap)
        if self._copies.get(digest) is not copy:
            return None
        if (value, last_use) != self._order(digest, copy):  # used since it came in
            self._push(digest, copy)
            return None
        return digest, copy

    def _order(self, digest: str, copy: _Copy) -> tuple[float, int]:
        return self._ledger.value(digest, copy.num_bytes), self._ledger.last_use(digest)

    def check_integrity(self) -> None:
        """Raise AssertionError when sums and heap disagree with the copies."""
        assert self._held.num_bytes >= 0, "held bytes"
        assert self._held.count >= 0, "held room"
        assert self._num_bytes == sum(copy.num_bytes for copy in self._copies.values()), "bytes"
        assert all(copy.entries for copy in self._copies.values()), "a copy for no name"
        in_heap = [copy for *_, digest, copy in self._heap if self._copies.get(digest) is copy]
        assert len(in_heap) == len(set(in_heap)) == len(self._copies), "the heap"
