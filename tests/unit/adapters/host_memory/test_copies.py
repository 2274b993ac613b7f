"""The order of copies in host memory gives what a look at every copy gives."""

import random

import pytest
from support.cases.host_entries import entry

from lora_jax.adapters.entries import RegistryLimits
from lora_jax.adapters.host_memory.copies import HostCopies
from lora_jax.adapters.host_memory.room import HostShare, copies_of, make_room
from lora_jax.adapters.host_memory.use_ledger import UseLedger
from lora_jax.adapters.registry_errors import AdapterRejected, RegistryBusy


class Books:
    """HostCopies, and the entries by name that it should know."""

    def __init__(self):
        self.ledger, self.entries, self.held = UseLedger(), {}, []
        self.copies = HostCopies(self.ledger)

    def publish(self, new):
        if (old := self.entries.pop(new.name, None)) is not None:
            self.copies.remove(old)
        self.ledger.used(new.digest)
        self.entries[new.name] = new
        self.copies.add(new)

    def remove(self, name):
        self.copies.remove(self.entries.pop(name))

    def wanted(self, new, share, limits, in_use, kept):
        """Return what a look at every copy gives."""
        others = [e for e in self.entries.values() if e.name != new.name]
        copies = copies_of(others, new.digest, in_use, self.ledger, kept)
        there = any(copy.digest == new.digest for copy in copies)
        size = 0 if there else new.report.weight_bytes
        most = limits.max_total_bytes, limits.max_in_memory
        held = sum(one.num_bytes for one in self.held), sum(one.count for one in self.held)
        return make_room(copies, size, share, most[0], max_count=most[1], held=held)


def answer(call, *arguments):
    try:
        return call(*arguments)
    except AdapterRejected as error:  # RegistryBusy too
        return type(error), str(error)


@pytest.mark.parametrize("seed", range(2))
def test_what_goes_is_what_a_look_at_every_copy_finds(seed):
    rng, books, seen = random.Random(seed), Books(), {"gone": 0, "busy": 0}
    sizes = {f"d{n}": rng.randrange(1, 40) for n in range(30)}
    limits = RegistryLimits(max_total_bytes=200, max_in_memory=rng.choice([None, 12]))
    for _ in range(400):
        digest, name = rng.choice(list(sizes)), f"n{rng.randrange(25)}"
        owner = rng.choice(["", "", "a"])
        new = entry(name, digest, sizes[digest], pinned=rng.random() < 0.05, owner=owner)
        digests = list({e.digest for e in books.entries.values()})
        in_use = set(rng.sample(digests, min(len(digests), rng.choice([0, 2, 12]))))
        kept = {f"n{rng.randrange(25)}" for _ in range(3)}
        share = HostShare(owner, max_bytes=rng.choice([None, 90]) if owner else None)
        arguments = new, share, limits, in_use, kept
        found = answer(books.copies.make_room, *arguments)
        assert found == answer(books.wanted, *arguments)
        if isinstance(found, set):
            for gone in books.copies.names(found - {digest}):
                books.ledger.evicted(books.entries[gone].digest, sizes[books.entries[gone].digest])
                books.remove(gone)
            books.publish(new)
            seen["gone"] += len(found)
        seen["busy"] += isinstance(found, tuple) and issubclass(found[0], RegistryBusy)
        if isinstance(found, set) and rng.random() < 0.3:  # another one is read next
            other = entry("read", f"other{len(books.held)}", rng.randrange(1, 10))
            if answer(books.copies.make_room, other, HostShare(), limits, digests, ()) == set():
                books.held.append(books.copies.hold(other))
        if books.held and rng.random() < 0.3:
            books.copies.give_back(held := books.held.pop(0))
            books.copies.give_back(held)
        for used in rng.choices(digests, k=3) if digests else ():
            books.ledger.used(used)
        if books.entries and rng.random() < 0.1:
            books.remove(rng.choice(list(books.entries)))
    books.copies.check_integrity()
    assert books.copies.holds_room == bool(books.held)
    assert min(seen.values()) > 10, seen
    assert books.ledger.num_halvings


def test_what_comes_and_goes_without_an_eviction_leaves_nothing_behind():
    books = Books()
    for number in range(200):
        books.publish(entry("a", f"d{number}", 1))
        books.remove("a")
    books.copies.check_integrity()
    assert len(books.copies._heap) < 100


def test_what_can_never_fit_is_refused():
    books, limits = Books(), RegistryLimits(max_total_bytes=8)
    with pytest.raises(AdapterRejected, match="takes 9 bytes, the limit is max_total_adapter"):
        books.copies.make_room(entry("a", "d", 9), HostShare(), limits, (), ())
