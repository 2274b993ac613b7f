"""Pages of host memory: what stays, what goes first, and that no move reads what is not there."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serving.api.request import PageMove
from serving.scheduling.pages.host_pages import HostPages
from serving.scheduling.pages.prefix_cache import PageCache

KEYS = [bytes([i]) for i in range(6)]


def test_a_page_goes_out_once_and_comes_back_under_its_key():
    host = HostPages(2)
    host.take_out(7, KEYS[0])
    host.take_out(8, KEYS[1])
    host.take_out(5, KEYS[0])  # another page of the same content: it is here already
    out = host.take_moves()
    assert out == (PageMove(7, 0, out=True), PageMove(8, 1, out=True))
    found = host.pin([KEYS[0], KEYS[1], KEYS[2]])
    host.bring_in(found, [3, 4])
    host.unpin()
    assert found == KEYS[:2]
    assert host.take_moves() == (PageMove(3, 0, out=False), PageMove(4, 1, out=False))
    assert host.take_moves() == ()
    assert (host.stats.moved_out, host.stats.moved_in, host.stats.used) == (2, 2, 2)


def test_the_page_unused_longest_goes_first_and_pinned_ones_stay():
    host = HostPages(2)
    host.take_out(0, KEYS[0])
    host.take_out(1, KEYS[1])
    host.take_out(0, KEYS[0])  # used again
    host.take_out(2, KEYS[2])
    assert (host.pin([KEYS[1]]), host.pin([KEYS[2]]), host.pin([KEYS[0]])) == (
        [],
        KEYS[2:3],
        KEYS[:1],
    )
    assert host.pin([KEYS[0], KEYS[2]]) == [KEYS[0], KEYS[2]]
    host.take_out(3, KEYS[3])  # no place is free: it is lost
    host.unpin()
    assert host.pin([KEYS[3]]) == []
    host.check_integrity()


def test_a_page_that_comes_back_is_used():
    host = HostPages(2)
    host.take_out(0, KEYS[0])
    host.take_out(1, KEYS[1])
    host.bring_in(host.pin(KEYS[:1]), [5])
    host.unpin()
    host.take_out(2, KEYS[2])
    assert (host.pin(KEYS[:1]), host.pin(KEYS[1:2])) == (KEYS[:1], [])
    host.unpin()


def test_without_room_nothing_is_kept_or_counted():
    host = HostPages()
    host.take_out(0, KEYS[0])
    host.record(4, 4)
    assert (host.take_moves(), host.pin(KEYS), host.stats.queries) == ((), [], 0)


class Moving(RuleBasedStateMachine):
    """A device of 4 pages over a host of 3: after each plan every known page has its content."""

    def __init__(self):
        super().__init__()
        self.host = HostPages(3)
        self.cache = PageCache(4, 1, on_evict=self.host.take_out)
        self.device: list[bytes | None] = [None] * 4
        self.slots: list[bytes | None] = [None] * 3
        self.held: list[list[int]] = []
        self.keys: dict[int, bytes] = {}  # of held pages: what a step writes to them

    @rule(first=st.integers(0, 5), count=st.integers(1, 3))
    def enter(self, first, count):
        keys = [KEYS[(first + i) % 6] + bytes([i]) for i in range(count)]
        matched = self.cache.match(keys)
        found = self.host.pin(keys[len(matched) :])
        fresh = self.cache.allocate(count - len(matched))
        if fresh is None:
            self.host.unpin()
            self.cache.free(matched)
            return
        self.host.bring_in(found, fresh[: len(found)])
        self.host.unpin()
        pages = matched + fresh
        for page, key in zip(pages, keys, strict=True):
            self.keys[page] = key
            self.cache.register(page, key)
        self.written = pages[len(matched) + len(found) :]
        self.brought = list(zip(found, fresh, strict=False))
        self._step()
        self.held.append(pages)

    def _step(self):
        for move in self.host.take_moves():
            if move.out:
                self.slots[move.slot] = self.device[move.page]
            else:
                self.device[move.page] = self.slots[move.slot]
        for key, page in self.brought:
            assert self.device[page] == key
        for page in self.written:
            self.device[page] = self.keys[page]

    @rule(place=st.integers(0, 9))
    def leave(self, place):
        if self.held:
            self.cache.free(self.held.pop(place % len(self.held)))

    @invariant()
    def books_agree(self):
        self.cache.check_integrity(self.held)
        self.host.check_integrity()
        for pages in self.held:
            assert all(self.device[page] == self.keys[page] for page in pages)


Moving.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestMoving = Moving.TestCase
