"""Extents of KV pages come and go with the books of the page cache."""

import random
from types import SimpleNamespace

import pytest

from serving.scheduling.pages.exchange import Offer, PageExchange
from serving.scheduling.pages.extents import PageExtents
from serving.scheduling.pages.prefix_cache import PageCache, PrefixChain

EXTENT, PAGES = 4, 2  # KV pages, and the pool's below them


class Memory:
    """A pool, and pages that leave when they are told to."""

    def __init__(self, pages: int):
        self.page_bytes, self.num_pages, self.num_available, self.left = 4096, 80, pages, []

    def map_pages(self, pages):
        self.num_available -= PAGES
        return True

    def leave_pages(self, pages, then):
        self.left.append(then)

    def settle(self):
        for then in self.left:
            self.num_available += PAGES
            then()
        self.left = []


def make(pool: int = 10, cache_pages: int = 24, least: int = 6):
    memory = Memory(pool)
    exchange = PageExchange(memory)
    cache = PageCache(cache_pages, 4, are_absent=True)
    how = {"extent": EXTENT, "extent_pages": PAGES, "least": least}
    extents = PageExtents(cache, exchange, memory, **how)
    return memory, exchange, cache, extents


def cached(cache: PageCache, token: int, count: int) -> list[bytes]:
    """Fill and free so many pages that can be found."""
    keys = PrefixChain("", "", 4).keys([token] * 4 * count, count)
    pages = cache.allocate(count)
    for page, key in zip(pages, keys, strict=True):
        cache.register(page, key)
    cache.free(pages)
    return keys


def use(cache: PageCache, extents: PageExtents, keys: list[bytes]) -> None:
    """Admit a prompt that begins with these pages, and end it."""
    extents.matched(pages := cache.match(keys))
    cache.free(pages)


def test_the_longest_sequence_always_has_its_pages():
    memory, _, cache, extents = make()
    assert (extents.num_present, cache.num_free, memory.num_available) == (2, 8, 6)
    assert extents.offer() is None
    with pytest.raises(ValueError, match="no room for 24 KV pages, those of the longest"):
        make(least=24)


def test_pages_come_when_they_are_wanted_as_far_as_there_is_room():
    memory, _, cache, extents = make(pool=6)
    assert not extents.want(9)
    assert (cache.num_free, memory.num_available) == (12, 0)
    assert not extents.want(13), "nobody has anything to give up"
    assert cache.num_free == 12
    extents.check_integrity()


def extents_of(pages: list[int]) -> list[int]:
    return sorted({page // EXTENT for page in pages})


def test_long_prompts_have_extents_of_their_own_and_short_ones_fill_gaps():
    _, _, cache, extents = make(pool=12)
    extents.want(24)
    short = cache.allocate(1)
    long = cache.allocate(5)
    assert extents_of(short) == [0]
    assert extents_of(long) == [0, 1], "one page more than an extent has, which fills a gap"
    assert extents_of(cache.allocate(2)) == [0]
    assert extents_of(cache.allocate(8)) == [2, 3]
    cache.free(long)
    assert extents_of(cache.allocate(4)) == [1]
    extents.check_integrity()


def test_an_extent_that_goes_takes_the_end_of_one_prefix_only():
    _, exchange, cache, extents = make(pool=12, least=2)
    extents.want(24)
    held = cache.allocate(1)
    prefixes = [cached(cache, token, 8) for token in (1, 2)]
    cache.free(held)
    for _ in range(3):  # two are blank
        exchange.take(extents.offer())
    assert [len(cache.match(keys)) for keys in prefixes] == [4, 8]
    extents.check_integrity()


def test_an_end_of_a_prefix_beside_a_page_that_nobody_wants_goes_by_its_age():
    _, exchange, cache, extents = make(pool=8, cache_pages=16, least=2)
    extents.want(16)
    old, new = cached(cache, 1, 4), cached(cache, 2, 7)
    for keys in (old, new):
        use(cache, extents, keys)
    cached(cache, 3, 1)  # in the gap behind the newer one
    for _ in range(2):  # one is blank
        exchange.take(extents.offer())
    assert [len(cache.match(keys)) for keys in (old, new)] == [0, 7]
    extents.check_integrity()


def test_cached_pages_are_taken_once_each_where_blank_ones_are_too_few():
    _, _, cache, extents = make(pool=4, cache_pages=8)
    keys = [cached(cache, token, 2) for token in (1, 2, 3)]
    assert cache.num_blank == 2
    pages = cache.allocate(5)
    assert len(set(pages)) == 5
    assert [len(cache.match(of)) for of in keys] == [0, 1, 2]
    extents.check_integrity()


def test_pages_behind_one_that_was_lost_are_blank_when_they_are_computed_again():
    _, exchange, cache, extents = make(cache_pages=16, least=2)
    extents.want(8)
    keys = PrefixChain("", "", 4).keys([1] * 20, 5)
    cached(cache, 1, 1)  # a first turn of a dialogue
    first, later = cache.match(keys), cache.allocate(4)
    for page, key in zip(later, keys[1:], strict=True):
        cache.register(page, key)
    cache.free(first + later)
    exchange.take(extents.offer())  # the extent of the first turn
    assert cache.match(keys) == []
    extents.want(5)
    again = cache.allocate(5)
    for page, key in zip(again, keys, strict=True):
        cache.register(page, key)
    assert cache.num_blank == 7, "no page lies twice"
    extents.check_integrity()
    cache.free(again)
    assert cache.match(keys) == again
    extents.check_integrity()


def test_idle_extents_leave_lowest_value_first_and_may_come_back():
    memory, exchange, cache, extents = make(least=2)
    extents.want(12)
    cached(cache, 1, 4)  # extent 0
    held = cache.allocate(1)  # extent 1
    offer = extents.offer()
    assert offer is not None
    assert (offer.value, offer.num_pages) == (0.0, PAGES)  # extent 2, blank
    exchange.take(offer)
    assert (extents.pages_leaving, cache.num_free, cache.num_absent) == (PAGES, 7, 16)
    offer = extents.offer()
    assert offer is not None
    assert offer.value > 0
    exchange.take(offer)
    assert cache.match(PrefixChain("", "", 4).keys([1] * 16, 4)) == []
    assert extents.offer() is None, "the last one has a page that is held"
    memory.settle()
    extents.want(12)
    assert extents.num_present == 4
    cache.free(held)
    extents.check_integrity()


def test_what_was_matched_is_worth_more_however_often():
    _, _, cache, extents = make(least=2)
    extents.want(12)
    first, second = cached(cache, 1, 4), cached(cache, 2, 4)
    for keys in (first, first, first, second):
        use(cache, extents, keys)
    cached(cache, 3, 4)  # nothing is blank any more
    for _ in range(2):  # the third one's extent, then that of the one used longest ago
        offer = extents.offer()
        assert offer is not None
        offer.give()
    assert not cache.match(first)
    assert len(cache.match(second)) == 4


def test_an_adapter_that_is_worth_less_than_any_cached_page_is_waited_for():
    memory, exchange, cache, extents = make(pool=4, least=2)
    extents.want(8)
    cached(cache, 1, 8)
    side = SimpleNamespace(pages_leaving=0)

    def leave():
        side.pages_leaving += 2

    side.offer = lambda: Offer(value, 2, leave)
    exchange.join(side)
    value = 1e9
    assert not extents.want(2), "a cached page is worth less"
    assert (side.pages_leaving, exchange.is_short) == (0, False)
    value = 0.0
    assert extents.want(2)
    assert exchange.is_short
    extents.start_step(0)
    assert extents.want(2)
    assert side.pages_leaving == 2, "once is enough"
    extents.start_step(0)
    assert extents.want(9), "more than there is: whatever it is worth"
    assert memory.num_available == 0
    for _ in range(65):
        assert exchange.is_short
        exchange.start_step()
    assert not exchange.is_short, "nobody has claimed anything for long"


def test_the_least_valuable_cached_page_goes_first_not_the_oldest():
    _, _, cache, extents = make(pool=4, least=8)
    old = cached(cache, 1, 3)
    use(cache, extents, old)  # worth more
    new = cached(cache, 2, 5)
    pages = cache.allocate(2)
    assert len(cache.match(old)) == 3
    assert len(cache.match(new)) == 3, "later pages of a prompt go before earlier ones"
    cache.free(pages)
    extents.check_integrity()


def test_a_page_that_was_computed_once_is_worth_its_chance_of_a_match():
    _, _, cache, extents = make(pool=4, least=2)
    for number in range(100):
        cached(cache, number, 4)  # nobody asks for it again
    assert extents._chance < 0.1
    for number in range(100, 200):
        use(cache, extents, cached(cache, number, 4))
    assert extents._chance > 0.9


def test_a_prompt_that_has_to_wait_changes_no_worth():
    _, _, cache, extents = make(pool=4, least=2)
    keys = cached(cache, 1, 4)
    before = extents._chance, extents.offer()
    for _ in range(50):
        cache.free(cache.match(keys))  # looked up, and no room for the rest
    assert extents._chance == before[0]
    assert extents._uses[:4] == [1] * 4


def test_the_order_of_cached_pages_stays_small():
    _, _, cache, extents = make(pool=10, least=6)
    keys = cached(cache, 1, 4)  # beside blank pages: nobody asks for the least
    for _ in range(200):
        cache.free(cache.match(keys))
    assert len(extents._order) <= 2 * 4 + 24 + 1
    assert extents.least_cached() in range(4)


def test_extents_with_the_pages_that_sequences_may_need_are_not_offered():
    _, _, cache, extents = make(pool=6, least=2)
    extents.want(12)
    extents.start_step(3)
    assert cache.num_free == 12
    offer = extents.offer()
    assert offer is not None
    offer.give()
    assert extents.offer() is None, "3 of 8 may be needed in the next step, and 3 soon after"


def test_random_walk():
    rng = random.Random(0)
    memory, exchange, cache, extents = make(pool=12, least=6)
    held: list[list[int]] = []
    for number in range(600):
        match rng.randrange(5):
            case 0:
                keys = PrefixChain("", "", 4).keys([number % 7] * 24, rng.randrange(1, 7))
                known = cache.match(keys)
                if (pages := cache.allocate(len(keys) - len(known))) is not None:
                    for page, key in zip(pages, keys[len(known) :], strict=True):
                        cache.register(page, key)
                    held.append(known + pages)
                else:
                    cache.free(known)
                    extents.want(12)
            case 1 if held:
                cache.free(held.pop(rng.randrange(len(held))))
            case 2:
                extents.start_step(rng.randrange(4))
            case 3 if rng.random() < 0.5 and (offer := extents.offer()) is not None:
                exchange.take(offer)
            case 4:
                memory.settle()
        cache.check_integrity(held)
        extents.check_integrity()
        assert extents.num_present >= 2
    assert exchange.num_given > 2
