"""Two kinds behind one residency: slots follow each other, everything finds its loader."""

from types import SimpleNamespace

import pytest

from lora_jax.adapters.allocator import AbstractAllocator, Placed, ResidencyStats
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.adapter_loaders import AdapterLoaders


class Slots(AbstractAllocator):
    """As many adapters as slots, none of them bigger than another."""

    def check_fits(self, weights):
        pass

    def can_place(self, weights):
        return bool(self._free_slots) and weights.digest not in self._placed

    def make_room(self, weights):
        return self.can_place(weights)

    def place(self, weights, *, pinned=False):
        slot = self._free_slots.pop(0)
        self._placed[weights.digest] = Placed(slot, None, pinned)
        return SimpleNamespace(digest=weights.digest, slot=slot)

    def stats(self):
        used = len(self._placed)
        return ResidencyStats(used, self.num_slots, 10 * used, 0)

    def _take_back(self, placed):
        self._return_slot(placed.slot)


class OneStep:
    """A job of one chunk that notes the digest in the state."""

    def __init__(self, placement, state):
        self.placement, self.remaining = placement, 1

    @property
    def done(self):
        return not self.remaining

    def advance(self, state, max_chunks):
        self.remaining = 0
        return (*state, self.placement.digest)


class Room:
    """Expert room that is told how far the steps are."""

    def __init__(self):
        self.is_busy, self.told, self.freed, self.closed, self.trimmed = False, [], 0, 0, 0
        self.tensors = SimpleNamespace(pages=lambda: SimpleNamespace(used_bytes=77), trim=self.trim)

    def trim(self):
        self.trimmed += 1

    def collect(self, dispatched, read):
        self.told.append((dispatched, read))
        freed, self.freed = self.freed, 0
        return freed

    def close(self):
        self.closed += 1

    def check_integrity(self):
        assert not self.is_busy


def entry(name, kind, *, pinned=False):
    weights = SimpleNamespace(digest=f"digest-{name}")
    return SimpleNamespace(
        name=name, kind=kind, digest=weights.digest, weights=weights, pinned=pinned
    )


LORA, OTHER, ESFT, LAST = (
    entry("l", "lora"),
    entry("m", "lora"),
    entry("e", "esft"),
    entry("f", "esft"),
)


class Case:
    def __init__(self, lora=2, esft=1):
        self.room = Room()
        self.device = SimpleNamespace(slots=(), reroute_tables=())
        self.loaders = AdapterLoaders(
            AdapterLoader(Slots(lora), OneStep),
            lora,
            AdapterLoader(Slots(esft), OneStep),
            self.room,
        )

    def advance(self):
        return self.loaders.advance(self.device, 10, 4, 3)


def test_slots_of_esft_follow_those_of_lora():
    case = Case()
    for one in (ESFT, LORA, OTHER):
        case.loaders.retain(one)
        assert case.loaders.acquire(one.digest) is None
        assert case.loaders.is_loading(one.digest)
    assert case.loaders.is_busy
    assert case.advance() == []
    assert case.device.slots == (LORA.digest, OTHER.digest)
    assert case.device.reroute_tables == (ESFT.digest,)
    assert case.room.told == [(4, 3)]
    assert [case.loaders.acquire(one.digest) for one in (LORA, OTHER, ESFT)] == [0, 1, 2]
    snapshot = case.loaders.snapshot
    assert snapshot.resident == {LORA.digest, OTHER.digest, ESFT.digest}
    assert (snapshot.slots_used, snapshot.slots_total, snapshot.swaps) == (3, 3, 3)
    assert (snapshot.bytes_used, snapshot.expert_page_bytes) == (30, 77)
    with pytest.raises(AssertionError, match="in use"):
        case.loaders.check_integrity()
    for one in (LORA, OTHER, ESFT):
        case.loaders.release(one.digest)
        case.loaders.drop(one.digest)
    assert not case.loaders.snapshot.resident
    case.loaders.check_integrity()


def test_each_kind_has_a_pool_and_what_stays_has_none():
    case = LostCase()
    assert case.loaders.pool_of(LORA.digest) == "lora"
    case.remote.is_lost, case.whole.known = True, {LORA.digest}
    assert case.loaders.pool_of(LORA.digest) is None  # its place is not the device loader's
    both = Case()
    both.loaders.reconcile([entry("p", "lora", pinned=True), LORA, ESFT])
    pools = [both.loaders.pool_of(f"digest-{name}") for name in "ple"]
    assert pools == [None, "lora", "esft"]


def test_each_kind_follows_its_own_part_of_the_registry():
    case = Case()
    case.loaders.reconcile([LORA, ESFT, LAST])
    case.advance()
    assert case.loaders.snapshot.resident == {LORA.digest, ESFT.digest}
    case.loaders.reconcile([LORA, LAST])
    assert case.loaders.snapshot.resident == {LORA.digest}
    case.advance()
    assert case.loaders.snapshot.resident == {LORA.digest, LAST.digest}


def test_named_adapters_come_in_when_a_place_has_become_free():
    case = Case()
    slots = case.loaders._esft._allocator
    case.loaders.reconcile([ESFT, LAST])
    case.advance()
    slots.evict_idle()
    slots.place(SimpleNamespace(digest="in the way"))
    case.advance()
    assert not case.loaders.is_busy  # nothing was freed: nobody looked
    slots.abandon_loading("in the way")
    case.room.freed = 1
    case.advance()
    assert case.loaders.snapshot.resident == {ESFT.digest}


def test_busy_while_anything_waits_to_be_freed():
    case = Case()
    assert not case.loaders.is_busy
    case.room.is_busy = True
    assert case.loaders.is_busy
    case.loaders.rest()
    case.loaders.close()
    assert (case.room.trimmed, case.room.closed) == (1, 1)


def test_without_esft_it_is_the_lora_loader():
    lora = AdapterLoader(Slots(2), OneStep)
    loaders, device = AdapterLoaders(lora, 2), SimpleNamespace(slots=(), reroute_tables=None)
    loaders.retain(LORA)
    assert loaders.acquire(LORA.digest) is None
    assert loaders.advance(device, 5, 0, 0) == []
    assert device.reroute_tables is None
    assert loaders.acquire(LORA.digest) == 0
    assert loaders.snapshot is lora.snapshot
    loaders.rest()
    loaders.close()
    loaders.release(LORA.digest)
    loaders.drop(LORA.digest)
    loaders.check_integrity()


class Remote:
    """A server that is there or not; every adapter has a part on it."""

    def __init__(self):
        self.is_lost, self.is_busy, self.ready, self.failures = False, False, True, []
        self.bound = {}

    def retain(self, entry):
        pass

    def drop(self, digest, dispatched):
        pass

    def collect(self, read):
        pass

    def is_ready(self, digest):
        return self.ready

    def bind(self, slot, digest):
        self.bound[slot] = digest

    def bind_local(self, slot):
        self.bound[slot] = "local"

    def take_failures(self):
        return self.failures


class Whole:
    """Experts for one adapter, in slot 7."""

    def __init__(self):
        self.user, self.known, self.instead, self.collected = None, set(), set(), 0
        self.is_busy = False

    def retain(self, entry):
        self.known.add(entry.digest)

    def drop(self, digest):
        self.known.discard(digest)

    def knows(self, digest):
        return digest in self.known

    def users(self, digest):
        return int(self.user == digest)

    def stands_in(self, digest):
        return digest in self.instead or self.user == digest

    def can_serve(self, digest):
        return self.user in (None, digest)

    def serve_instead(self, digest):
        self.instead.add(digest)

    def acquire(self, digest):
        self.user = digest
        return 7

    def release(self, digest):
        assert self.user == digest
        self.user = None

    def collect(self):
        self.collected += 1

    def check_integrity(self):
        pass


class LostCase(Case):
    def __init__(self):
        super().__init__()
        self.remote, self.whole = Remote(), Whole()
        lora = AdapterLoader(Slots(2), OneStep)
        self.loaders = AdapterLoaders(lora, 2, remote=self.remote, local=self.whole)
        for one in (LORA, OTHER):
            self.loaders.retain(one)
            self.loaders.acquire(one.digest)
        self.advance()


def test_while_the_server_is_lost_who_has_room_is_served_here():
    case = LostCase()
    digest = LORA.digest
    assert case.loaders.acquire(digest) == 0
    case.remote.is_lost = True
    case.remote.failures = [(digest, "lost"), (OTHER.digest, "lost")]
    assert case.loaders.servable_here([digest, "unknown"]) == {digest, "unknown"}
    assert case.loaders.acquire(digest) is None  # a sequence is in the other slot still
    case.loaders.release(digest)
    assert case.loaders.acquire(digest) == 7
    assert case.remote.bound == {0: digest, 7: "local"}
    assert case.advance() == [(OTHER.digest, "lost")]  # there is room for one
    assert not case.whole.instead
    case.remote.is_lost, case.remote.failures = False, []
    assert case.loaders.acquire(digest) == 7  # all of its sequences are in one slot
    assert case.loaders.acquire(OTHER.digest) == 1
    case.loaders.release(digest)
    assert case.loaders.acquire(digest) == 0
    case.advance()
    assert case.whole.collected == 2


def test_an_adapter_that_the_server_refuses_is_served_here():
    case = LostCase()
    case.remote.ready, case.remote.failures = False, [(LORA.digest, "broken files")]
    assert case.loaders.acquire(LORA.digest) is None
    assert case.advance() == []
    assert case.whole.instead == {LORA.digest}
    assert case.loaders.acquire(LORA.digest) == 7
