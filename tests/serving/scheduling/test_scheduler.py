import dataclasses
import random

import pytest
from scheduler_driver import Driver, check_answer, limits

from serving.request import FinishReason, QueueFull, Sequence, SequenceState


def test_one_request_gives_its_tokens_and_ends_at_its_length():
    driver = Driver(limits())
    (sequence,) = driver.add([1, 2, 3], max_tokens=5, ignore_eos=True)
    driver.run()
    check_answer(driver, sequence)
    assert len(sequence.output_ids) == 5
    assert driver.device.computed == 3 + 4  # the last token's K and V are never needed


def test_decodes_come_before_prefills_and_a_long_prompt_comes_in_chunks():
    driver = Driver(limits(max_num_batched_tokens=8))
    (first,) = driver.add([1, 2], max_tokens=20, ignore_eos=True)
    driver.step()
    (second,) = driver.add(range(1, 20), max_tokens=2)
    chunks = [driver.step().chunks for _ in range(3)]
    assert [[(c.sequence, c.num_tokens, c.samples) for c in step] for step in chunks] == [
        [(first, 1, True), (second, 7, False)],
        [(first, 1, True), (second, 7, False)],
        [(first, 1, True), (second, 5, True)],
    ]
    driver.run()
    check_answer(driver, first)
    check_answer(driver, second)


def test_the_host_plans_a_token_it_does_not_know_yet():
    driver = Driver(limits())
    (sequence,) = driver.add([1, 2], max_tokens=9, ignore_eos=True)
    driver.step()
    plan = driver.scheduler.plan(driver.now)
    assert sequence.output_ids == []
    assert [(c.start, c.num_tokens) for c in plan.chunks] == [(2, 1)]


def test_the_result_of_an_overrun_is_dropped():
    driver = Driver(limits())
    (probe,) = driver.add([5, 6], max_tokens=12, ignore_eos=True)
    driver.run()
    stop = probe.output_ids[3]
    place = probe.output_ids.index(stop)
    (sequence,) = driver.add([5, 6], max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    driver.run()
    assert sequence.output_ids == probe.output_ids[: place + 1]
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.num_computed == sequence.num_prompt + place + 1  # the overrun was planned


def test_min_tokens_outlasts_a_stop_token():
    driver = Driver(limits())
    (probe,) = driver.add([5, 6], max_tokens=12, ignore_eos=True)
    driver.run()
    stops = probe.output_ids[:1]
    (sequence,) = driver.add(
        [5, 6], max_tokens=12, min_tokens=4, ignore_eos=True, stop_token_ids=stops
    )
    driver.run()
    check_answer(driver, sequence)
    assert len(sequence.output_ids) >= 4


def test_prompt_only_requests_end_without_a_token_and_with_all_their_scores():
    driver = Driver(limits(max_num_batched_tokens=4, max_logit_rows=4))
    (sequence,) = driver.add(range(1, 14), max_tokens=0, echo=True, prompt_logprobs=1)
    driver.run()
    check_answer(driver, sequence)
    assert sequence.output_ids == []
    assert len(driver.scores[sequence]) == 12


def test_prompt_scores_keep_to_the_logit_rows():
    driver = Driver(limits(max_logit_rows=4, max_num_batched_tokens=12))
    (sequence,) = driver.add(range(1, 12), max_tokens=2, prompt_logprobs=0)
    assert driver.step().num_tokens == 4
    driver.run()
    check_answer(driver, sequence)


def test_a_known_prefix_is_not_computed_again_unless_scores_are_asked_for():
    driver = Driver(limits())
    prompt = list(range(1, 11))
    driver.add(prompt, max_tokens=1)
    driver.run()
    before = driver.device.computed
    (again,) = driver.add(prompt, max_tokens=1)
    driver.run()
    assert again.num_cached_tokens == 8
    assert driver.device.computed - before == 2
    (scored,) = driver.add(prompt, max_tokens=1, prompt_logprobs=0)
    driver.run()
    assert scored.num_cached_tokens == 0
    stats = driver.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (20, 8)
    check_answer(driver, again)
    check_answer(driver, scored)


@pytest.mark.parametrize("change", [{"adapter": "b"}, {"adapter": "a", "salt": "tenant"}, {}])
def test_prefixes_are_not_shared_across_adapters_or_salts(change):
    driver = Driver(limits())
    prompt = list(range(1, 11))
    driver.add(prompt, adapter="a")
    driver.run()
    (other,) = driver.add(prompt, **change)
    driver.run()
    assert other.num_cached_tokens == 0
    check_answer(driver, other)


def test_a_conversation_finds_its_own_answer_in_the_cache():
    driver = Driver(limits())
    (first,) = driver.add([1, 2, 3, 4], max_tokens=9, ignore_eos=True)
    driver.run()
    (second,) = driver.add([*first.token_ids, 7], max_tokens=2)
    driver.run()
    assert second.num_cached_tokens == 12
    check_answer(driver, second)


def test_choices_share_the_pages_of_the_prompt():
    driver = Driver(limits(max_num_seqs=6))
    prompt = list(range(1, 18))
    choices = driver.add(prompt, n=4, max_tokens=3, ignore_eos=True)
    assert [len(driver.step().chunks) for _ in range(3)] == [1, 1, 4]
    driver.run()
    for choice in choices:
        check_answer(driver, choice)
    assert len({tuple(choice.output_ids) for choice in choices}) > 1
    assert [choice.num_cached_tokens for choice in choices] == [0, 16, 16, 16]
    assert driver.device.computed == 17 + 3 * 1 + 4 * 2


def test_earliest_deadline_enters_first():
    driver = Driver(limits(max_num_seqs=1))
    late, early, middle = (
        driver.add([i], deadline_s=deadline, max_tokens=1)[0]
        for i, deadline in enumerate([30.0, 10.0, 20.0], 1)
    )
    driver.run()
    assert driver.ended == [early, middle, late]


def test_the_shortest_job_enters_first_and_the_longest_gives_way():
    roomy = Driver(limits(max_num_seqs=1, scheduling_policy="sjf"))
    long, short, shorter = (
        roomy.add(prompt, deadline_s=deadline, max_tokens=most, ignore_eos=True)[0]
        for prompt, deadline, most in (([1] * 6, 1.0, 9), ([2] * 6, 9.0, 3), ([3], 9.0, 4))
    )
    roomy.run()
    assert roomy.ended == [shorter, short, long]
    tight = Driver(limits(num_pages=6, enable_prefix_caching=False, scheduling_policy="sjf"))
    longer, shorter = (
        tight.add([i] * 4, deadline_s=float(i), max_tokens=most, ignore_eos=True)[0]
        for i, most in ((1, 16), (2, 15))
    )
    tight.run()
    assert (longer.num_preemptions > 0, shorter.num_preemptions) == (True, 0)
    check_answer(tight, longer)


def test_the_latest_deadline_gives_way_when_pages_run_out_and_loses_no_token():
    driver = Driver(limits(num_pages=6, enable_prefix_caching=False))
    first, second = (
        driver.add([i, i, i, i], deadline_s=float(i), max_tokens=16, ignore_eos=True)[0]
        for i in (1, 2)
    )
    driver.run()
    assert (first.num_preemptions, second.num_preemptions > 0) == (0, True)
    assert driver.scheduler.stats().num_preemptions == second.num_preemptions
    assert driver.ended == [first, second]
    check_answer(driver, first)
    check_answer(driver, second)


def test_nobody_enters_in_a_step_that_sent_somebody_back():
    driver = Driver(limits(num_pages=6, max_num_seqs=2, enable_prefix_caching=False))
    for i in (1, 3):
        driver.add([i] * 4, deadline_s=float(i), max_tokens=16, ignore_eos=True)
    driver.step(depth=0)
    driver.add([2], deadline_s=2.0, max_tokens=1)
    while not driver.scheduler.stats().num_preemptions:
        plan = driver.step(depth=0)
    assert plan.admitted == ()
    assert driver.scheduler.stats().num_waiting_capacity == 2


def test_who_enters_leaves_room_to_grow():
    driver = Driver(limits(num_pages=4, enable_prefix_caching=False))
    for _ in range(3):
        driver.add([1] * 4, max_tokens=5, ignore_eos=True)
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0


def test_who_waits_for_pages_holds_no_slot_unless_it_ran_before():
    driver = Driver(limits(num_pages=6, enable_prefix_caching=False), ticks=1)
    (first,) = driver.add([1] * 4, adapter="a", deadline_s=1.0, max_tokens=16, ignore_eos=True)
    (second,) = driver.add([2] * 4, adapter="b", deadline_s=2.0, max_tokens=16, ignore_eos=True)
    (third,) = driver.add([3] * 12, adapter="a", deadline_s=3.0)
    while not second.num_preemptions:
        driver.step()
    driver.step()
    assert second.state is SequenceState.WAITING
    assert (first.slot >= 0, second.slot >= 0, third.slot >= 0) == (True, True, False)
    driver.run()
    for sequence in (first, second, third):
        check_answer(driver, sequence)


def test_a_preempted_prompt_scores_each_token_once():
    driver = Driver(limits(num_pages=6))
    driver.add([1] * 4, deadline_s=1.0, max_tokens=16, ignore_eos=True)
    (scored,) = driver.add(
        [2] * 11, deadline_s=2.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1
    )
    driver.run()
    assert scored.num_preemptions > 0
    check_answer(driver, scored)


def test_a_sequence_that_ends_while_preempted_leaves_the_queue():
    driver = Driver(limits(num_pages=4, enable_prefix_caching=False))
    driver.add([1] * 4, deadline_s=1.0, max_tokens=12, ignore_eos=True)
    (second,) = driver.add([2] * 4, deadline_s=2.0, max_tokens=5, ignore_eos=True)
    driver.run()
    assert second.num_preemptions == 1  # while its last token was in flight
    assert driver.device.computed == 4 + 11 + 4 + 4  # so that nothing was computed again
    check_answer(driver, second)


def test_abort_ends_every_choice_and_frees_everything():
    driver = Driver(limits())
    choices = driver.add([1, 2, 3], n=3, adapter="a", max_tokens=30, ignore_eos=True)
    for _ in range(8):
        driver.step()
    assert set(driver.scheduler.abort(choices[0].request.request_id)) == set(choices)
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.kv_usage) == (0, 0.0)
    assert driver.residency.users == {"a": 0}
    assert driver.scheduler.abort("unknown") == []
    for choice in choices:
        assert choice.finish_reason is FinishReason.ABORT
        check_answer(driver, choice)


def test_finishing_twice_keeps_the_first_reason():
    driver = Driver(limits())
    (sequence,) = driver.add([1])
    driver.scheduler.finish(sequence, FinishReason.STOP)
    driver.scheduler.finish(sequence, FinishReason.ABORT)
    assert sequence.finish_reason is FinishReason.STOP


def test_a_full_queue_says_when_to_come_back():
    driver = Driver(limits(max_queue=2))
    driver.add([1], n=2)
    with pytest.raises(QueueFull, match="2 of 2") as full:
        driver.add([2])
    assert full.value.retry_after_s > 0
    driver.run()
    driver.add([2])


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "no tokens"),
        (range(48), {}, r"Input length \(48\) exceeds model's maximum context length \(48\)"),
        (range(49), {"max_tokens": 0, "echo": True}, r"\(49\) exceeds"),
        (range(20), {"max_tokens": 28}, "12 KV pages; the cache has 8"),
    ],
)
def test_what_can_never_run_is_refused(prompt, sampling, message):
    driver = Driver(limits(num_pages=8))
    with pytest.raises(ValueError, match=message):
        driver.add(prompt, **sampling)
    assert not driver.scheduler.has_work


def test_an_id_in_use_is_refused():
    driver = Driver(limits())
    (sequence,) = driver.add([1])
    with pytest.raises(ValueError, match="r1"):
        driver.scheduler.add(sequence.request)


def test_the_longest_possible_sequence_runs_to_the_models_length():
    driver = Driver(limits(num_pages=12))
    (sequence,) = driver.add([1] * 40, max_tokens=1000, ignore_eos=True)
    driver.run()
    assert len(sequence.output_ids) == 8
    check_answer(driver, sequence)


def test_limits_that_starve_decodes_are_refused():
    with pytest.raises(ValueError, match=r"max_logit_rows \(3\) must be at least max_num_seqs"):
        limits(max_logit_rows=3)


def test_a_hit_passes_a_miss_and_base_needs_no_slot():
    driver = Driver(limits(), num_slots=2, ticks=5)
    driver.add([1], adapter="a", max_tokens=1)
    driver.run()
    (miss,) = driver.add([2], adapter="b", deadline_s=0.0)
    (hit,) = driver.add([3], adapter="a", deadline_s=1.0)
    (base,) = driver.add([4], deadline_s=2.0)
    plan = driver.step()
    assert [c.sequence for c in plan.chunks] == [hit, base]
    stats = driver.scheduler.stats()
    assert (stats.num_waiting_adapter, stats.num_waiting_capacity) == (1, 0)
    assert (stats.running_adapters, stats.waiting_adapters) == (("a",), ("b",))
    driver.run()
    check_answer(driver, miss)


def test_an_idle_slot_goes_to_the_waiter_with_the_earliest_deadline():
    driver = Driver(limits(), num_slots=1, ticks=1)
    driver.add([1], adapter="a", max_tokens=8, ignore_eos=True)
    driver.step()
    driver.step()
    (late,) = driver.add([2], adapter="c", deadline_s=50.0, max_tokens=2)
    (early,) = driver.add([3], adapter="b", deadline_s=40.0, max_tokens=2)
    driver.run()
    assert driver.ended[1:] == [early, late]
    assert driver.residency.loads == ["a", "b", "c"]


def test_a_wait_for_an_adapter_is_bounded():
    driver = Driver(limits(adapter_wait_s=5.0), num_slots=1)
    driver.add([1], adapter="a", max_tokens=40, ignore_eos=True)
    driver.step()
    (waiter,) = driver.add([2], adapter="b", n=1)
    added = driver.now
    while waiter.state is not SequenceState.FINISHED:
        driver.step()
    assert waiter.finish_reason is FinishReason.ERROR
    assert 5.0 <= driver.now - added <= 7.0
    driver.run()


def test_steady_hits_cannot_starve_a_waiter():
    driver = Driver(limits(adapter_wait_s=40.0), num_slots=1, ticks=1)
    driver.add([1], adapter="a", max_tokens=6, ignore_eos=True)
    driver.step()
    (waiter,) = driver.add([2], adapter="b", max_tokens=3)
    while waiter.state is not SequenceState.FINISHED:
        driver.add([3], adapter="a", max_tokens=6, ignore_eos=True)
        driver.step()
    assert waiter.finish_reason is not FinishReason.ERROR
    check_answer(driver, waiter)
    driver.run()
    for sequence in driver.ended:
        check_answer(driver, sequence)


def test_sequences_that_wait_for_an_adapter_can_be_failed():
    driver = Driver(limits())
    (waiter,) = driver.add([2], adapter="b")
    driver.add([3])
    assert driver.scheduler.waiting_for("b") == [waiter]


def test_after_a_failed_step_the_waiting_go_on_and_no_old_page_is_used():
    driver = Driver(limits(max_num_seqs=2))
    prompt = [1, 2, 3, 4, 5]
    running = [driver.add(prompt, max_tokens=9)[0] for _ in range(2)]
    (waiting,) = driver.add(prompt, max_tokens=9)
    driver.step()
    driver.step()
    assert driver.scheduler.fail_running() == running
    driver.in_flight.clear()
    driver.device.kv = [None] * len(driver.device.kv)
    driver.run()
    assert waiting.num_cached_tokens == 0
    check_answer(driver, waiting)


def test_a_bad_step_of_some_adapters_ends_them_alone_and_no_page_of_theirs_is_used():
    driver = Driver(limits(max_num_seqs=4))
    prompt = list(range(1, 10))
    bad, base, other = (driver.add(prompt, adapter=a, max_tokens=9)[0] for a in ("b", "", "o"))
    for _ in range(3):
        driver.step()
    (late,) = driver.add(prompt, adapter="b", max_tokens=9)
    pages = list(bad.pages)
    assert pages
    assert driver.scheduler.fail_adapters(frozenset({"b"})) == [bad]
    assert bad.finish_reason is FinishReason.ERROR
    for page in pages:  # whatever the bad step wrote
        for offset in range(driver.scheduler.limits.page_size):
            driver.device.kv[page * driver.scheduler.limits.page_size + offset] = None
    driver.run()
    assert late.num_cached_tokens == 0
    for sequence in (late, base, other):
        check_answer(driver, sequence)


def harm(driver: Driver, *adapters: str) -> list[Sequence]:
    """Make all that steps have written, and will write, of these adapters wrong; start anew."""
    digests = frozenset(adapters)
    running = {c.sequence for plan in driver.plans[-3:] for c in plan.chunks}
    pages = [p for s in running if s.request.adapter_digest in digests for p in s.pages]
    lost = driver.scheduler.restart_adapters(digests)
    size = driver.scheduler.limits.page_size
    for place in (page * size + offset for page in pages for offset in range(size)):
        driver.device.kv[place] = 12345
    driver.scheduler.check_integrity()
    return lost


def test_sequences_harmed_by_a_bad_step_are_computed_anew_from_the_tokens_known():
    driver = Driver(limits(max_num_seqs=4))
    prompt = list(range(1, 10))
    bad, base = (driver.add(prompt, adapter=a, max_tokens=9, ignore_eos=True)[0] for a in ("b", ""))
    for _ in range(4):
        driver.step()
    known = list(bad.output_ids)
    assert known
    assert bad.num_in_flight
    assert harm(driver, "b") == []
    assert (bad.slot, bad.row, bad.output_ids) == (-1, -1, known)
    assert not driver.residency.users["b"]
    (late,) = driver.add(prompt, adapter="b", max_tokens=9)
    driver.run()
    for sequence in (bad, late, base):
        check_answer(driver, sequence)
    assert bad.num_preemptions == 1
    assert not base.num_preemptions


def test_who_still_awaits_scores_of_the_prompt_cannot_start_anew():
    driver = Driver(limits(max_num_batched_tokens=4, max_logit_rows=4))
    (scored,) = driver.add(range(1, 14), adapter="b", max_tokens=3, prompt_logprobs=1)
    while not scored.num_in_flight:
        driver.step()
    assert harm(driver, "b") == [scored]
    assert scored.finish_reason is FinishReason.ERROR
    driver.run()


def test_without_a_seed_each_request_draws_its_own_and_an_engine_seed_repeats_them():
    def seeds():
        driver = Driver(limits())
        return [driver.add([1], seed=None)[0].seed for _ in range(3)]

    assert len(set(seeds())) == 3
    assert seeds() == seeds()


SHAPES = {
    "roomy": {"num_pages": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24},
    "few pages": {"num_pages": 13},
    "no cache": {"num_pages": 13, "enable_prefix_caching": False},
    "small steps": {"max_num_batched_tokens": 4, "max_logit_rows": 4},
    "impatient": {"adapter_wait_s": 12.0},
}


def random_request(rng: random.Random) -> dict:
    stem = [rng.choice([[1] * 9, [2] * 9, [1] * 4 + [3] * 6]), []][rng.random() < 0.3]
    prompt = stem + [rng.randrange(20) for _ in range(rng.randrange(1, 12))]
    scores = rng.random() < 0.2
    max_tokens = rng.randrange(0 if scores else 1, 20)
    return {
        "prompt": prompt,
        "adapter": rng.choice(["", "", "a", "a", "b", "c", "d", "e"]),
        "salt": rng.choice(["", "", "", "salt"]),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "max_tokens": max_tokens,
        "min_tokens": rng.randrange(max_tokens + 1) if rng.random() < 0.3 else 0,
        "ignore_eos": rng.random() < 0.5,
        "stop_token_ids": [rng.randrange(20)] if rng.random() < 0.3 else [],
        "prompt_logprobs": 1 if scores else None,
        "seed": rng.randrange(100),
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(6))
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
