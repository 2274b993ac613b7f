"""Random requests, aborts and bad steps: every sequence gives what it gives alone."""

import dataclasses
import random

import pytest
from support.drivers.scheduler_driver import Driver, check_answer, harm, limits, random_request

from serving.api.request import FinishReason

SHAPES = {
    "roomy": {"num_pages": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24},
    "few pages": {"num_pages": 13},
    "no cache": {"num_pages": 13, "enable_prefix_caching": False},
    "small steps": {"max_num_batched_tokens": 4, "max_logit_rows": 4},
    "impatient": {"adapter_wait_s": 12.0},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(s, marks=pytest.mark.long) for s in range(2, 6))]
)
def test_random_walk_gives_every_sequence_what_it_gives_alone(shape, seed):
    faulty = seed % 2 == 1
    rng = random.Random(f"{shape} {seed}")
    driver = Driver(limits(**SHAPES[shape]), num_slots=3, ticks=rng.randrange(1, 5))
    added, requests = [], []
    for _ in range(150):
        if rng.random() < 0.35:
            deadline_s = driver.now + rng.choice([5.0, 20.0, 20.0, 80.0])
            requests.append(driver.add(**random_request(rng), deadline_s=deadline_s))
            added += requests[-1]
        if requests and rng.random() < 0.05:
            driver.ended += driver.scheduler.abort(rng.choice(requests)[0].request.request_id)
        if faulty and rng.random() < 0.05:
            lost = harm(driver, *rng.sample("abcde", 2))
            assert all(s.request.sampling.prompt_logprobs is not None for s in lost)
            driver.ended += lost
        driver.step(depth=rng.choice([0, 1, 1, 1, 2]))
    steps = driver.run(max_steps=3000)
    assert sorted(s.number for s in driver.ended) == [s.number for s in added]
    for sequence in added:
        check_answer(driver, sequence)
    if shape != "impatient" and not faulty:
        assert not [s for s in added if s.finish_reason is FinishReason.ERROR]
    assert steps < 20 * len(added)
    if faulty:
        assert any(s.num_preemptions for s in added)
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting_adapter, stats.kv_usage) == (0, 0, 0.0)
    assert not any(driver.residency.users.values())


def test_random_walks_reach_what_they_are_meant_to_reach():
    """The walk above must meet preemptions, prefix hits and misses, or it proves little."""
    rng = random.Random(7)
    driver = Driver(limits(num_pages=13))
    for _ in range(200):
        if rng.random() < 0.4:
            driver.add(**random_request(rng), deadline_s=driver.now + rng.choice([5.0, 50.0]))
        driver.step()
    driver.run(max_steps=3000)
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 5
    assert stats.prefix_hits > 50
    assert len(driver.residency.loads) > 10


def test_order_of_planning_does_not_change_with_the_depth_of_the_pipeline():
    answers = []
    for depth in (0, 1, 2, 3):
        driver = Driver(limits(num_pages=9))
        rng = random.Random(3)
        sequences = [s for _ in range(12) for s in driver.add(**random_request(rng))]
        driver.run(depth=depth)
        answers.append([dataclasses.astuple(s)[3] for s in sequences])
    assert all(answer == answers[0] for answer in answers)
