"""One pool of pages under a scheduler's steps: nothing is read that has no memory."""

import random
from types import SimpleNamespace

import pytest
from support.cases import adapter_cases
from support.doubles.faulty_memory import LateMemory
from support.doubles.late_clears import LateClears
from support.drivers.pool_driver import FLOAT, PAGE, PoolDriver, shifting
from support.drivers.scheduler_driver import check_answer, limits

from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.lora_load_job import LoadFailed
from lora_jax.adapters.slots import init_slots, size_slots
from lora_jax.memory.host import HostMemory
from lora_jax.memory.pool import PagePool
from lora_jax.pooled import PooledRows
from serving.api.request import FinishReason
from serving.loading.page_room import PooledLoadJob

PHASES = ("adapters", "long", "both")


def walk(steps: int, seed: int, pages: int = 50, **how) -> PoolDriver:
    """Run random requests in phases; check everything after every step."""
    rng = random.Random(seed)
    bounds = limits(num_pages=40, adapter_wait_s=1e9, max_num_seqs=4)
    driver = PoolDriver(bounds, pages=pages, **how)
    added = []
    for number in range(steps):
        phase = PHASES[number * 9 // steps % 3]
        if rng.random() < 0.35 and len(added) - len(driver.ended) < 20:
            added += driver.add(**shifting(rng, phase))
        if added and rng.random() < 0.02:
            driver.ended += driver.scheduler.abort(rng.choice(added[-5:]).request.request_id)
        driver.step(depth=rng.choice([0, 1, 1, 2]))
        driver.pool.check_integrity()
    driver.run(max_steps=3000)
    for _ in range(20):
        driver.step()
    driver.check()
    for sequence in added:
        check_answer(driver, sequence)
        assert sequence.finish_reason is not FinishReason.ERROR
    assert driver.most_kv > 8, "KV never took more than its own"
    assert driver.most_adapters > 3, "adapters never took more than a few"
    assert driver.exchange.num_given > 10
    return driver


def test_memory_moves_both_ways_and_every_sequence_gives_what_it_gives_alone():
    walk(400, seed=1).room.close()


def test_no_step_is_sent_before_the_pages_that_came_are_zeros():
    memory = LateClears()
    driver = walk(100, seed=1, pages=64, memory=memory, overrun=2)
    assert memory.num_cleared > 20
    driver.room.close()


@pytest.mark.long
def test_ten_thousand_steps():
    walk(10_000, seed=2).room.close()


def test_a_load_that_fails_leaves_no_copy_under_way_to_rows_that_lose_their_memory():
    catalogue = adapter_cases.llama()
    spec = size_slots(catalogue, 1, 4, FLOAT.itemsize)
    memory = LateMemory(HostMemory())
    pool = PagePool(memory, page_bytes=PAGE, budget_bytes=PAGE * 1000)
    rows = PooledRows(pool, spec.rows, FLOAT)
    rows.map([(width, 0, count) for width, count in spec.rows.items()])
    placement = SlotAllocator(catalogue, 1, spec.rows).place(adapter_cases.weights(catalogue, 4))
    job = PooledLoadJob(placement, rows, SimpleNamespace(has_memory=lambda digest: True))
    memory.fail("begin_write", 2)
    with pytest.raises(LoadFailed, match="injected"):
        job.advance(init_slots(catalogue, spec, FLOAT, rows=rows.arrays), 1000)
    assert not memory.heal()
    assert not memory.begun
    rows.close()
