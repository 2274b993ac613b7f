"""One pool of pages under a scheduler's steps: nothing is read that has no memory."""

import random

import pytest
from support.drivers.pool_driver import PoolDriver, shifting
from support.drivers.scheduler_driver import check_answer, limits

from serving.api.request import FinishReason

PHASES = ("adapters", "long", "both")


def walk(steps: int, seed: int) -> PoolDriver:
    """Run random requests in phases; check everything after every step."""
    rng = random.Random(seed)
    driver = PoolDriver(limits(num_pages=40, adapter_wait_s=1e9, max_num_seqs=4), pages=50)
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


@pytest.mark.long
def test_ten_thousand_steps():
    walk(10_000, seed=2).room.close()
