"""The page pool: all or nothing, reuse, budget, and threads."""

import sys
import threading
from collections.abc import Callable

import pytest
from support.doubles.faulty_memory import FaultyMemory, counting_memory

from lora_jax.memory.pool import Block, PagePool
from lora_jax.memory.virtual import MappingError, OutOfPages


def make_pool(pages: int, prefill: int = 0) -> tuple[PagePool, FaultyMemory]:
    memory = FaultyMemory(counting_memory(16)[0])
    pool = PagePool(memory, page_bytes=32, budget_bytes=pages * 32 + 31, prefill_pages=prefill)
    return pool, memory


def counts(pool: PagePool) -> tuple[int, int, int, int]:
    stats = pool.stats()
    return stats.created, stats.in_use, stats.free, stats.peak


def test_pages_are_made_on_demand_and_reused():
    pool, memory = make_pool(5)
    first = pool.acquire([1] * 3)
    assert len(set(first)) == 3
    assert counts(pool) == (3, 3, 0, 3)
    for page in first:
        pool.release(page)
    assert counts(pool) == (3, 0, 3, 3)
    memory.fail("create_page", 0)
    assert set(pool.acquire([1] * 3)) == set(first)
    assert memory.heal()
    assert pool.stats().budget == 5
    pool.check_integrity()


def test_prefill_is_there_at_once():
    pool, memory = make_pool(5, prefill=4)
    assert counts(pool) == (4, 0, 4, 0)
    memory.fail("create_page", 0)
    pool.acquire([1] * 4)
    with pytest.raises(OutOfPages, match="injected"):
        pool.acquire([1])


def test_more_than_the_budget_is_refused_and_nothing_changes():
    pool, memory = make_pool(5)
    pool.acquire([1] * 2)
    pool.release(pool.acquire([1])[0])
    with pytest.raises(OutOfPages, match="the budget is 5, 2 are in use"):
        pool.acquire([1] * 4)
    assert counts(pool) == (3, 2, 1, 3)
    assert memory.usage().created == 3 * 32
    assert len(pool.acquire([1] * 3)) == 3


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_page_that_cannot_be_had_undoes_the_others(after):
    pool, memory = make_pool(9)
    pool.release(pool.acquire([1])[0])
    memory.fail("create_page", after)
    with pytest.raises(OutOfPages, match="injected"):
        pool.acquire([1] * 4)
    assert counts(pool) == (1, 0, 1, 1)
    assert memory.usage().created == 32
    pool.check_integrity()


def test_only_a_block_in_use_is_released():
    pool, _ = make_pool(2)
    (page,) = pool.acquire([1])
    pool.release(page)
    assert counts(pool)[:3] == (1, 0, 1)
    with pytest.raises(ValueError, match="is not in use"):
        pool.release(page)
    with pytest.raises(ValueError, match="block 99 is not in use"):
        pool.release(Block(99, 1))


def test_blocks_of_a_size_are_used_again_and_others_make_room():
    pool, memory = make_pool(9)
    large, single = pool.acquire([5, 1])
    assert (large.num_pages, single.num_pages) == (5, 1)
    assert memory.usage().created == 6 * 32
    pool.release(large)
    assert counts(pool) == (6, 1, 5, 6)
    memory.fail("create_page", 0)
    assert pool.acquire([5]) == [large]
    assert memory.heal()
    pool.release(large)
    third, again = pool.acquire([3, 5])  # there is room for both
    assert (third.num_pages, again) == (3, large)
    pool.release(large)
    assert pool.acquire([2, 2])[0].num_pages == 2  # only where the larger one was
    assert counts(pool) == (8, 8, 0, 9)
    assert memory.usage().created == 8 * 32
    with pytest.raises(OutOfPages, match="2 more pages of 32 bytes are 1 too many"):
        pool.acquire([2])
    pool.check_integrity()


def test_free_blocks_make_room_on_a_device_that_is_full():
    pool, memory = make_pool(9)
    pool.release(pool.acquire([4])[0])
    memory.fail("create_page", 1)
    first, second = pool.acquire([1, 2])
    assert (first.num_pages, second.num_pages) == (1, 2)
    assert counts(pool) == (3, 3, 0, 4)
    assert memory.usage().created == 3 * 32
    pool.check_integrity()


def test_trim_gives_free_pages_back_to_the_memory():
    pool, memory = make_pool(6)
    kept = pool.acquire([1] * 2)
    for page in pool.acquire([1] * 3):
        pool.release(page)
    assert pool.trim() == 3 * 32
    assert memory.usage().created == 2 * 32
    assert counts(pool)[:3] == (2, 2, 0)
    assert pool.trim() == 0
    pool.release(kept[0])
    assert pool.trim() == 32


def lines_of(call: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs, each round of a loop counted."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def test_many_free_pages_make_no_load_slower():
    took = []
    for free in (10, 1000):
        pool, _ = make_pool(2000, prefill=free)
        pool.release(pool.acquire([7])[0])
        found = [lines_of(lambda pool=pool, size=size: pool.acquire([size])) for size in (1, 7, 3)]
        took.append(found)
    assert took[0] == took[1]
    assert min(took[0]) > 0


def test_a_block_that_the_memory_keeps_stays_free():
    pool, memory = make_pool(5, prefill=3)
    memory.fail("destroy_page", 1)
    with pytest.raises(MappingError, match="injected"):
        pool.trim()
    assert counts(pool)[:3] == (2, 0, 2)
    pool.check_integrity()
    memory.heal()
    assert pool.trim() == 2 * 32


def test_bad_sizes_are_refused():
    memory, _ = counting_memory(16)
    for size in (0, 24, -16):
        with pytest.raises(ValueError, match=f"page_bytes {size}"):
            PagePool(memory, page_bytes=size, budget_bytes=64)
    for prefill in (-1, 3):
        with pytest.raises(ValueError, match=f"prefill_pages {prefill}"):
            PagePool(memory, page_bytes=32, budget_bytes=64, prefill_pages=prefill)
    for sizes in ([-1], [1, 0]):
        with pytest.raises(ValueError, match="cannot acquire blocks of"):
            PagePool(memory, page_bytes=32, budget_bytes=64).acquire(sizes)
    assert PagePool(memory, page_bytes=32, budget_bytes=0).acquire([]) == []


def test_threads_never_get_the_same_page():
    pool, _ = make_pool(12)
    held: set[Block] = set()
    guard, errors = threading.Lock(), []

    def work() -> None:
        for i in range(200):
            try:
                pages = pool.acquire([1 + i % 2] * (1 + i % 4))
            except OutOfPages:
                continue
            with guard:
                if held & set(pages):
                    errors.append(pages)
                held.update(pages)
            with guard:
                held.difference_update(pages)
                for page in pages:
                    pool.release(page)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert counts(pool)[1] == 0
    pool.check_integrity()
