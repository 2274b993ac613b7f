"""One request after another: budgets, prefixes, deadlines, pages that run out, ends."""

import pytest
from support.drivers.scheduler_driver import Driver, check_answer, limits

from serving.api.request import FinishReason, SequenceState


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


def test_prompts_get_less_of_a_step_in_which_sequences_decode():
    """All of it without one, then 16 tokens in all, then 8 for each that decodes."""
    sizes = {"max_num_batched_tokens": 48, "mixed_step_tokens": 16}
    driver = Driver(limits(**sizes, num_pages=256, max_model_len=160))
    asked = {"max_tokens": 40, "ignore_eos": True}
    driver.add(range(1, 49), **asked)
    tokens = [driver.step().num_tokens]
    driver.add(range(100, 200), **asked)
    tokens += [driver.step().num_tokens for _ in range(7)]
    driver.add([201], **asked), driver.add(range(300, 400), **asked)
    tokens += [driver.step().num_tokens for _ in range(2)]
    assert tokens == [48, *[16] * 6, 1 + 10, 16, 24]
    driver.run()
    for sequence in driver.scores:
        check_answer(driver, sequence)


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


def test_the_longest_possible_sequence_runs_to_the_models_length():
    driver = Driver(limits(num_pages=12))
    (sequence,) = driver.add([1] * 40, max_tokens=1000, ignore_eos=True)
    driver.run()
    assert len(sequence.output_ids) == 8
    check_answer(driver, sequence)


def test_limits_that_starve_decodes_are_refused():
    with pytest.raises(ValueError, match=r"max_logit_rows \(3\) must be at least max_num_seqs"):
        limits(max_logit_rows=3)
