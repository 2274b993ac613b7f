"""Rank rows over a pool: what fits, what leaves, and when its place is free again."""

import numpy as np
import pytest
from support.cases import adapter_cases
from support.drivers.pool_driver import PAGE, WIDE, Entry

from lora_jax.adapters.slots import SlotsSpec, init_slots, rows_per_adapter
from lora_jax.kv_cache import KVShape
from lora_jax.memory.host import HostMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.virtual import OutOfPages
from lora_jax.pooled import PooledPages, PooledRows
from serving.loading.page_room import PageRoom
from serving.loading.pooled_allocator import PooledSlotAllocator
from serving.scheduling.pages.exchange import PageExchange

FLOAT = np.dtype(np.float32)
CATALOGUE = adapter_cases.llama(**WIDE)
ONE, TWO, THREE, BIG = (
    adapter_cases.weights(CATALOGUE, rank, seed=rank, digest=name)
    for name, rank in (("one", 4), ("two", 5), ("three", 3), ("big", 16))
)


def make(pages: int, slots: int = 3, most: int | None = None):
    pool = PagePool(HostMemory(), page_bytes=PAGE, budget_bytes=pages * PAGE)
    rows = {w: pages * PAGE // (4 * w) for w in rows_per_adapter(CATALOGUE, 8)}
    kv = PooledPages(pool, KVShape(2, 1, 64, 64), 8, 4, FLOAT)
    room = PageRoom(pool, kv, PooledRows(pool, rows, FLOAT))
    exchange = PageExchange(pool)
    limit = pages if most is None else most
    allocator = PooledSlotAllocator(CATALOGUE, slots, rows, 4, room, exchange, limit)
    return room, allocator, room.jobs(allocator)


def come(allocator: PooledSlotAllocator, digest: str) -> None:
    """Have a load end, and a first request use the adapter."""
    allocator.finish_loading(digest)
    allocator.acquire(digest)
    allocator.release(digest)


def test_an_adapter_beyond_its_part_of_the_pool_is_refused_by_name():
    _, allocator, _ = make(40, most=6)
    with pytest.raises(ValueError, match="pages of the pool; 6 may be adapters'"):
        allocator.check_fits(BIG)


def test_what_leaves_is_free_when_its_steps_have_been_read():
    room, allocator, _ = make(13, slots=3)
    allocator.place(ONE)
    come(allocator, "one")
    assert not allocator.can_place(TWO)
    assert not allocator.make_room(TWO)
    assert allocator.num_leaving == 1
    assert allocator.pages_leaving >= 1
    allocator.check_integrity()
    assert room.collect(dispatched=3, read=2) == 0  # a step in flight may read the rows
    assert not allocator.make_room(TWO)
    assert room.collect(dispatched=4, read=3) == 1
    allocator._exchange.start_step()
    assert allocator.make_room(TWO)
    assert allocator.place(TWO).cleared_slots == ()
    room.check_integrity()


def test_an_adapter_that_a_request_names_is_worth_a_use_more_and_a_held_one_stays():
    _, allocator, _ = make(60, slots=2)
    for weights in (ONE, TWO):
        allocator.place(weights)
        come(allocator, weights.digest)
    allocator.is_needed = lambda digest: digest == "one"
    offer = allocator.offer()
    assert offer is not None
    offer.give()
    assert allocator.resident() == ("one",)
    allocator.protect(frozenset({"one"}))
    assert allocator.offer() is None
    allocator.protect(frozenset())
    assert allocator.offer() is not None


def test_what_a_device_copies_by_itself_begins_in_one_step():
    room, allocator, _ = make(60)
    slots = init_slots(CATALOGUE, SlotsSpec(3, {}), FLOAT, rows=room.rows.arrays)
    small = room.jobs(allocator, 1 << 10)(allocator.place(ONE), slots)
    large = room.jobs(allocator, 1 << 27)(allocator.place(TWO), slots)
    assert small.remaining > 8
    assert large.remaining == 2
    large.advance(slots, 8)
    assert large.done
    small.advance(slots, 8)
    assert not small.done


def test_an_adapter_without_a_slot_has_the_least_valuable_leave():
    room, allocator, _ = make(60, slots=2)
    for weights in (ONE, TWO):
        allocator.place(weights)
        come(allocator, weights.digest)
    for digest in ("one", "one", "two"):
        allocator.acquire(digest)
        allocator.release(digest)
    assert allocator.resident() == ("one", "two")
    assert not allocator.make_room(BIG)
    assert allocator.resident() == ("one",), "the oldest, but used more"
    room.collect(1, 1)
    assert allocator.make_room(BIG)


def test_two_adapters_in_a_step_are_placed_for_requests():
    _, allocator, _ = make(60, slots=4)
    for weights in (ONE, TWO):
        assert allocator.make_room(weights)
        allocator.place(weights)
    assert allocator.make_room(BIG), "nobody waits for it"
    allocator.is_needed = lambda digest: True
    assert not allocator.make_room(BIG)
    allocator.place(THREE)  # one that nobody waits for
    assert not allocator.make_room(BIG)
    allocator._exchange.start_step()
    assert allocator.make_room(BIG)


def test_users_pins_and_loads_stay():
    _, allocator, _ = make(60)
    allocator.place(ONE)
    assert allocator.offer() is None
    come(allocator, "one")
    allocator.acquire("one")
    assert allocator.offer() is None
    allocator.release("one")
    allocator.pin("one", True)
    assert allocator.offer() is None
    allocator.pin("one", False)
    offer = allocator.offer()
    assert offer is not None
    assert offer.num_pages * PAGE <= ONE.report.weight_bytes < (offer.num_pages + 1) * PAGE


def test_a_load_writes_rows_and_then_the_table():
    room, allocator, make_job = make(60)
    spec = SlotsSpec(3, {64: 1, 48: 1})
    slots = init_slots(CATALOGUE, spec, FLOAT, rows=room.rows.arrays)
    job = make_job(allocator.place(ONE), slots)
    assert job.remaining == 2
    slots = job.advance(slots, 1)
    assert job.done
    assert int(np.asarray(slots.entries)[:, :, 0, 2].max()) == 4
    for width, start, count in allocator._placed["one"].room:
        rows = [m.reshape(-1, width) for m in ONE.matrices() if m.shape[-1] == width]
        found = np.asarray(slots.pools[str(width)])[start : start + count]
        np.testing.assert_array_equal(found, np.concatenate(rows))
    assert allocator.stats().bytes_used == ONE.report.weight_bytes


def test_a_device_without_memory_fails_the_load_and_loses_nothing(monkeypatch):
    room, allocator, make_job = make(60)

    def refuse(rows):
        raise OutOfPages("full")

    monkeypatch.setattr(room.rows, "map", refuse)
    job = make_job(allocator.place(ONE), None)
    with pytest.raises(RuntimeError, match="no memory for its rows"):
        job.advance(None, 1)
    allocator.abandon_loading("one")
    room.collect(1, 1)
    allocator.check_integrity()
    room.check_integrity()
    monkeypatch.undo()
    assert allocator.make_room(ONE)
    allocator.place(ONE)
    assert allocator.has_memory("one")
    assert Entry("a", ONE).digest == "one"


def test_a_slot_that_left_for_an_adapter_is_kept_for_it():
    room, allocator, _ = make(60, slots=1)
    allocator.place(ONE)
    come(allocator, "one")
    assert not allocator.make_room(TWO)
    room.collect(dispatched=1, read=1)
    allocator._exchange.start_step()
    assert not allocator.make_room(BIG), "a busier adapter would take what left for another"
    assert allocator.make_room(TWO)
    allocator.place(TWO)
    allocator.abandon_loading("two")
    room.collect(dispatched=2, read=2)
    for _ in range(6):
        allocator._exchange.start_step()
    assert allocator.make_room(BIG), "nobody else asks any more"


def test_slots_that_left_are_emptied_where_holes_may_not_be_read():
    room, allocator, _ = make(60)
    allocator.place(ONE)
    come(allocator, "one")
    allocator.retire("one")
    assert room.take_left_slots() == (), "on a host holes are zeros"
    room.rows.overrun = 32
    allocator.place(TWO)
    allocator.abandon_loading("two")
    assert room.take_left_slots() == (1,)
    assert room.take_left_slots() == ()


def test_an_adapter_that_has_come_stays_until_its_request_finds_it():
    room, allocator, _ = make(60)
    allocator.place(ONE)
    allocator.finish_loading("one")
    assert allocator.offer() is None, "others would have it leave before it was of use"
    allocator.acquire("one")
    allocator.release("one")
    assert allocator.offer() is not None
    allocator.place(TWO)
    allocator.finish_loading("two")
    for _ in range(8):
        allocator._exchange.start_step()
    allocator.acquire("one")
    assert allocator.offer() is not None, "nobody came for it"
    room.close()
