"""Sequences come and go: refusals, ends and aborts give back what was held."""

import pytest
from support.drivers.scheduler_driver import Driver, check_answer, limits

from serving.api.request import FinishReason, QueueFull


def test_a_sequence_that_ends_while_preempted_leaves_the_queue():
    driver = Driver(limits(num_pages=4, enable_prefix_caching=False))
    driver.add([1] * 4, deadline_s=1.0, max_tokens=12, ignore_eos=True)
    (second,) = driver.add([2] * 4, deadline_s=2.0, max_tokens=5, ignore_eos=True)
    driver.run()
    assert second.num_preemptions == 1  # while its last token was in flight
    assert driver.device.computed == 4 + 11 + 4 + 4  # so that nothing was computed again
    check_answer(driver, second)


def test_requests_wait_for_a_turn_as_far_as_rows_are_free():
    """Others gain nothing by it: their first tokens wait for the ends of answers."""
    driver = Driver(limits(max_num_seqs=3))
    for number in range(5):
        driver.add([1 + number] * 3, max_tokens=6, ignore_eos=True)
    assert len(driver.scheduler.waiting_since()) == 3
    driver.step()
    assert driver.scheduler.stats().num_running == 3
    assert driver.scheduler.waiting_since() == []
    driver.run()
    driver.add([9], max_tokens=2)
    assert len(driver.scheduler.waiting_since()) == 1
    driver.run()


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
    with pytest.raises(QueueFull, match="max_queue=2") as full:
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


def test_without_a_seed_each_request_draws_its_own_and_an_engine_seed_repeats_them():
    def seeds():
        driver = Driver(limits())
        return [driver.add([1], seed=None)[0].seed for _ in range(3)]

    assert len(set(seeds())) == 3
    assert seeds() == seeds()


def test_a_prompt_finds_no_page_of_one_that_nobody_shall_remember():
    driver, prompt = Driver(limits()), [1] * 9
    for wanted, found in ((False, 0), (True, 0), (True, 8)):
        driver.scheduler.remember_prefixes(wanted)
        (sequence,) = driver.add(prompt, max_tokens=1)
        driver.run()
        assert sequence.num_cached_tokens == found
    assert driver.scheduler.stats().prefix_queries == 18
