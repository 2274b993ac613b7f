import collections

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from serving.api.images import PreparedImage, PromptImage
from serving.scheduling.pages.prefix_cache import PageCache, PrefixChain

SIZE = 4


def keys(tokens: list[int], adapter: str = "", salt: str = "") -> list[bytes]:
    return PrefixChain(adapter, salt, SIZE).keys(tokens, len(tokens) // SIZE)


def filled(cache: PageCache, tokens: list[int]) -> list[int]:
    """Pages of these tokens, full ones registered, held."""
    pages = cache.allocate(-(-len(tokens) // SIZE))
    assert pages is not None
    for page, key in zip(pages, keys(tokens), strict=False):
        cache.register(page, key)
    return pages


def test_a_prefix_is_found_until_its_first_difference():
    cache = PageCache(8, SIZE)
    tokens = list(range(12))
    pages = filled(cache, tokens)
    changed = [*tokens[:5], 99, *tokens[6:]]
    assert cache.match(keys(tokens)) == pages
    assert cache.match(keys(changed)) == pages[:1]
    cache.check_integrity([pages, pages, pages[:1]])


@pytest.mark.parametrize(
    ("adapter", "salt"), [("b", ""), ("", "s"), ("as", ""), ("", "as")], ids=str
)
def test_another_adapter_or_salt_never_matches(adapter, salt):
    cache = PageCache(8, SIZE)
    tokens = list(range(8))
    pages = cache.allocate(2)
    for page, key in zip(pages, keys(tokens, "a", "s"), strict=True):
        cache.register(page, key)
    assert cache.match(keys(tokens, adapter, salt)) == []
    assert cache.match(keys(tokens, "a", "s")) == pages


def test_keys_depend_on_where_adapter_and_salt_part():
    assert keys([1] * 4, "ab", "c") != keys([1] * 4, "a", "bc")


def test_the_same_page_after_other_tokens_has_another_key():
    assert keys([1] * 8)[1] != keys([2] * 4 + [1] * 4)[1]


def test_keys_tell_images_and_their_places_apart_where_the_tokens_are_the_same():
    tokens = [7] * 5 + [9] * 6 + [7] * 5  # an image of six tokens in pages 1 and 2

    def keys_with(*images: tuple[bytes, int, int], last: int = 0) -> list[bytes]:
        made = [
            PromptImage(PreparedImage(None, (1, size), size, digest), start, b"")
            for digest, start, size in images
        ]
        chain = PrefixChain("", "", SIZE, made)
        return [chain.last_key(tokens[:last])] if last else chain.keys(tokens, 4)

    ways = [
        keys_with((b"a" * 32, 5, 6)),
        keys_with((b"a" * 31 + b"b", 5, 6)),
        keys_with((b"a" * 32, 5, 3), (b"a" * 32, 8, 3)),
        keys_with((b"a" * 32, 4, 6)),
        keys_with(),
    ]
    assert ways[0] == keys_with((b"a" * 32, 5, 6))
    ends = [keys_with((digest * 32, 8, 3), last=11) for digest in (b"a", b"b")]  # in page 2 alone
    ends.append(keys_with(last=11))
    assert len({key for (key,) in ends}) == 3
    # The third has the first one's digest at the same place as far as page 1 reaches.
    assert [len({way[page] for way in ways}) for page in range(4)] == [1, 4, 5, 5]


def test_keys_of_more_tokens_than_known_are_refused():
    with pytest.raises(ValueError, match="2 pages of 4 need more than 7 tokens"):
        PrefixChain("", "", SIZE).keys(range(7), 2)


def test_least_recently_freed_goes_first_and_the_end_of_a_prefix_before_its_start():
    cache = PageCache(4, SIZE)
    first, second = filled(cache, [1] * 8), filled(cache, [2] * 8)
    cache.free(first)
    cache.free(second)
    taken = cache.allocate(3)
    assert taken == [first[1], first[0], second[1]]
    assert cache.match(keys([1] * 8)) == []
    assert cache.match(keys([2] * 8)) == second[:1]


def test_what_is_computed_again_behind_a_lost_page_takes_the_place_of_its_equals():
    cache = PageCache(8, SIZE)
    tokens = list(range(12))
    first = filled(cache, tokens)
    cache.free(first)
    cache.free(cache.allocate(6))  # the last page of the prefix, then blank ones, are others'
    assert cache.match(keys(tokens)) == first[:2]
    cache.free(first[:2])
    cache.remove([first[0]])  # no page of the prefix is found without it
    assert cache.match(keys(tokens)) == []
    again = filled(cache, tokens)
    assert cache.num_blank == 4, "the second page is there once"
    cache.check_integrity([again])
    cache.free(again)
    assert cache.match(keys(tokens)) == again


def test_of_two_equal_pages_that_are_held_the_first_stays_known():
    cache = PageCache(8, SIZE)
    tokens = list(range(12))
    first, second = filled(cache, tokens), filled(cache, tokens)
    cache.free(second)
    assert cache.num_blank == 5
    assert cache.match(keys(tokens)) == first


def test_a_held_page_is_never_given_away():
    cache = PageCache(3, SIZE)
    held = filled(cache, [1] * 8)
    again = cache.match(keys([1] * 8))
    cache.free(held)
    assert cache.allocate(2) is None
    assert cache.allocate(1) is not None
    cache.free(again)
    assert cache.num_free == 2
    with pytest.raises(ValueError, match="not held"):
        cache.free(again)


def test_without_prefix_caching_nothing_is_found_and_all_pages_are_usable():
    cache = PageCache(2, SIZE, enable_prefix_caching=False)
    pages = filled(cache, [1] * 8)
    assert sorted(pages) == [0, 1]
    cache.free(pages)
    assert cache.match(keys([1] * 8)) == []


def test_usage_counts_held_pages_only():
    cache = PageCache(4, SIZE)
    pages = filled(cache, [1] * 8)
    assert cache.usage == 0.5
    cache.free(pages)
    assert cache.usage == 0.0


class PageMachine(RuleBasedStateMachine):
    """Sequences over few tokens, so that prefixes meet; a model remembers what pages hold."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.cache = PageCache(7, SIZE)
        self.holders: collections.Counter[tuple[int, ...]] = collections.Counter()
        self.content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end

    @rule(
        target=held,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
    )
    def enter(self, tokens):
        chain = keys(tokens)
        matched = self.cache.match(chain)
        for i, page in enumerate(matched):
            assert self.content[page] == tuple(tokens[: (i + 1) * SIZE])
        need = -(-len(tokens) // SIZE) - len(matched)
        free = self.cache.num_free
        fresh = self.cache.allocate(need)
        if fresh is None:
            assert need > free
            self.cache.free(matched)
            return multiple()
        assert need <= free
        assert not set(fresh) & {page for pages in self.holders for page in pages}
        pages = (*matched, *fresh)
        for i, page in enumerate(fresh, len(matched)):
            self.content[page] = tuple(tokens[: (i + 1) * SIZE])
        for page, key in list(zip(pages, chain, strict=False))[len(matched) :]:
            self.cache.register(page, key)
        self.holders[pages] += 1
        return pages

    @rule(pages=consumes(held))
    def leave(self, pages):
        self.cache.free(pages)
        self.holders[pages] -= 1
        self.holders += collections.Counter()

    @precondition(lambda self: not self.holders)
    @rule()
    def everything_is_free_when_nobody_holds(self):
        assert self.cache.num_free == 7

    @invariant()
    def books_agree(self):
        self.cache.check_integrity(list(self.holders.elements()))


TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_the_key_of_the_last_page_follows_the_tokens_though_it_is_kept():
    chain, tokens = PrefixChain("a", "", 4), [1, 2, 3, 4, 5]
    first = chain.last_key(tokens)
    assert chain.last_key(tokens) == first
    tokens.append(6)
    assert chain.last_key(tokens) == PrefixChain("a", "", 4).last_key(tokens) != first
