"""The life of an adapter that every kind shares, on an allocator whose room is a number."""

import pytest

from lora_jax.adapters.allocator import AbstractAllocator, Placed, ResidencyStats


class Numbers(AbstractAllocator):
    """Room is one of two numbers; weights are digests."""

    def __init__(self):
        super().__init__(2)
        self.gone = []

    def check_fits(self, weights):
        pass

    def can_place(self, weights):
        return weights not in self._placed and bool(self._free_slots)

    def place(self, weights, *, pinned=False):
        slot = self._free_slots.pop(0)
        self._placed[weights] = Placed(slot, weights, pinned)
        return slot

    def stats(self):
        return ResidencyStats(len(self._placed), self.num_slots, 0, 0)

    def _take_back(self, placed):
        self.gone.append(placed.room)
        self._return_slot(placed.slot)


def brought(*digests):
    allocator = Numbers()
    for digest in digests:
        allocator.place(digest)
        allocator.finish_loading(digest)
    return allocator


def test_use_keeps_an_adapter_and_retirement_waits_for_its_end():
    allocator = brought("a")
    assert allocator.acquire("a") == 0
    allocator.acquire("a")
    allocator.retire("a")
    allocator.release("a")
    assert allocator.users("a") == 1
    assert not allocator.evict_idle()
    allocator.release("a")
    assert allocator.gone == ["a"]
    assert allocator.users("a") == 0
    allocator.retire("a")  # unknown by now


def test_retired_while_it_loads_goes_when_it_is_there_unless_restored():
    allocator = Numbers()
    for digest in "ab":
        allocator.place(digest)
        allocator.retire(digest)
    allocator.restore("b")
    allocator.restore("nobody")
    for digest in "ab":
        allocator.finish_loading(digest)
    assert (allocator.gone, allocator.resident()) == (["a"], ("b",))


def test_the_least_recently_used_idle_one_goes():
    allocator = brought("a", "b")
    allocator.acquire("a")
    allocator.release("a")
    allocator.pin("a", True)
    assert not allocator.can_place("c")
    assert allocator.evict_idle()
    assert allocator.gone == ["b"]
    assert not allocator.evict_idle()
    allocator.pin("a", False)
    assert allocator.evict_idle()
    assert allocator.can_place("c")
    allocator.check_integrity()


@pytest.mark.parametrize("needed", ["", "a", "ab"])
@pytest.mark.parametrize("protected", ["", "a", "b", "ab"])
def test_the_first_that_may_go_is_found_without_a_look_at_all(needed, protected):
    allocator = brought("a", "b")
    allocator.is_needed = needed.__contains__
    allocator.protect(frozenset(protected))
    assert allocator._first_idle() == next(iter(allocator._idle()), None)


def test_misuse_is_named():
    allocator = brought("a")
    for call, message in (
        (lambda: allocator.acquire("x"), "x is not resident"),
        (lambda: allocator.release("a"), "a is not in use"),
        (lambda: allocator.pin("x", True), "x has no slot"),
        (lambda: allocator.finish_loading("a"), "a is not loading"),
        (lambda: allocator.abandon_loading("x"), "x is not loading"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
