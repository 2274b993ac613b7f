"""Waits for adapters, their bounds, and the effect of an adapter's failed step."""

from support.drivers.scheduler_driver import Driver, check_answer, harm, limits

from serving.api.request import FinishReason, SequenceState


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


def test_prompts_whose_adapters_were_there_come_before_one_that_has_just_got_its_own():
    driver = Driver(limits(max_num_batched_tokens=4), num_slots=2, ticks=1)
    driver.add([1], adapter="a", max_tokens=1)
    driver.run()
    (miss,) = driver.add([2, 3, 4], adapter="b", max_tokens=1, deadline_s=0.0)
    driver.step()
    driver.now -= 1.0  # the next step follows at once
    (hit,) = driver.add([5, 6, 7], adapter="a", max_tokens=1, deadline_s=1.0)
    assert [c.sequence for c in driver.step().chunks] == [hit, miss]
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


def test_a_pool_of_pages_is_told_that_a_sequence_starves(monkeypatch):
    driver = Driver(limits(adapter_wait_s=8.0), num_slots=1)
    pages, told = driver.scheduler._pages, []
    monkeypatch.setattr(pages, "start_step", lambda *_, is_starving: told.append(is_starving))
    driver.add([1], adapter="a", max_tokens=40, ignore_eos=True)
    driver.step()
    driver.add([2], adapter="b")
    for _ in range(7):
        driver.step()
    assert told[0] is False
    assert told[-1] is True
    assert told == sorted(told)


def test_sequences_that_wait_for_an_adapter_can_be_failed():
    driver = Driver(limits())
    (waiter,) = driver.add([2], adapter="b")
    driver.add([3])
    assert driver.scheduler.waiting_for("b") == [waiter]


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


def test_a_miss_leaves_the_adapter_that_a_later_request_finds_there():
    driver = Driver(limits(), num_slots=2, ticks=1)
    for name in "ab":
        driver.add([1], adapter=name, max_tokens=1)
        driver.run()
    (miss,) = driver.add([2], adapter="c", deadline_s=0.0)
    (hit,) = driver.add([3], adapter="a", deadline_s=1.0)
    plan = driver.step()
    assert [chunk.sequence for chunk in plan.chunks] == [hit]
    driver.run()
    check_answer(driver, miss)
    assert driver.residency.loads == ["a", "b", "c"], "a, used longer ago than b, was there"


def test_a_sequence_that_cannot_run_yet_holds_no_slot():
    driver = Driver(limits(num_pages=16), num_slots=1, ticks=1)
    driver.add([1], adapter="a", max_tokens=1)
    driver.run()
    driver.add([1] * 40, max_tokens=8, ignore_eos=True)
    driver.step()
    (late,) = driver.add([2] * 30, adapter="a", deadline_s=50.0)  # pages are short
    (early,) = driver.add([3], adapter="b", deadline_s=40.0)
    for _ in range(3):
        driver.step()
    assert late.slot == -1
    driver.run(max_steps=200)
    check_answer(driver, late)
    check_answer(driver, early)
