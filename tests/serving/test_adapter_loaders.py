"""Two kinds behind one residency: slots follow each other, everything finds its loader."""

from types import SimpleNamespace

import pytest

from lora_jax.adapters.allocator import AbstractAllocator, Placed, ResidencyStats
from serving.adapter_loader import AdapterLoader
from serving.adapter_loaders import AdapterLoaders


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
    """A plan of one chunk that notes the digest in the state."""

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
