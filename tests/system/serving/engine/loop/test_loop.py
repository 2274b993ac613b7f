"""The loop over a device that answers at once, breaks, or hangs."""

import threading

import pytest
from support.cases.loop_cases import Case
from support.cases.loop_ends import ended, held_from, wait_sound
from support.waiting import wait_until

from serving.api.request import (
    EngineDead,
    FinishReason,
    QueueFull,
)
from serving.engine.loop import loop as engine_loop


def test_a_step_is_dispatched_before_the_one_before_is_read(case):
    _, deltas = case.ask(max_tokens=6)
    wait_until(lambda: ended(deltas))
    assert [token for delta in deltas for token in delta.token_ids] == [70] * 6
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    wait_until(lambda: len(case.runner.order) == 12)
    assert case.runner.order[:4] == ["dispatch", "dispatch", "read", "dispatch"]
    wait_sound(case)


def test_callers_get_their_tokens_before_adapters_are_loaded(case):
    order = case.runner.order
    case.residencies.advance = lambda *_: order.append("load") or []
    case.residencies.is_busy, told = True, []
    case.ask(max_tokens=6, on_output=lambda delta: order.append("told") or told.append(delta))
    wait_until(lambda: ended(told))
    case.residencies.is_busy = False
    assert "dispatch read told load" in (done := " ".join(order))
    assert "dispatch load read" not in done
    wait_sound(case)


def test_a_short_step_is_read_before_the_next_is_dispatched(case):
    flood, go_on = [], threading.Event()
    case.runner.trouble = held_from(lambda: len(flood) > 8, go_on)
    case.ask(tenant="flood", n=6, max_tokens=50, on_output=flood.append)
    wait_until(lambda: len(flood) > 8)
    _, deltas = case.ask(tenant="caller", max_tokens=2)
    go_on.set()
    wait_until(lambda: ended(deltas))
    place = case.runner.order.index("short")
    assert case.runner.order[place + 1 : place + 4] == ["read", "read", "dispatch"]
    assert deltas[0].token_ids == (70,)
    wait_until(lambda: sum(delta.finish_reason is not None for delta in flood) == 6)
    assert sum(len(delta.token_ids) for delta in flood) == 300
    wait_sound(case)


def test_a_failing_step_kills_the_engine_and_everyone_is_told(case, caplog):
    def trouble(plan):
        if plan.chunks[0].start > 0:
            raise RuntimeError("the device is gone")

    case.runner.trouble = trouble
    _, deltas = case.ask(max_tokens=50)
    wait_until(lambda: ended(deltas))
    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert deltas[-1].retryable
    assert deltas[-1].error
    wait_until(lambda: not case.loop.is_alive)
    with pytest.raises(EngineDead):
        case.ask()
    assert "the device is gone" in caplog.text
    assert str(case.loop.end.result(60)) == "the device is gone"


def test_closing_ends_live_requests_and_the_thread(tokenizer):
    before = set(threading.enumerate())
    case = Case(tokenizer)
    (thread,) = set(threading.enumerate()) - before
    _, deltas = case.ask(adapter="sql")
    assert case.loop.is_alive
    case.loop.close()
    case.loop.close()
    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert deltas[-1].retryable
    assert not case.loop.is_alive
    assert case.loop.end.result(60) is None
    assert case.runner.order[-2:] == ["wait", "freed"]  # the device is idle, and its memory free
    assert not thread.is_alive()
    with pytest.raises(EngineDead):
        case.ask()
    case.compilations.close()


def test_a_hanging_step_shows(case, monkeypatch):
    monkeypatch.setattr(engine_loop, "STALL_S", 0.2)
    hold = threading.Event()
    case.runner.trouble = lambda plan: hold.wait(30)
    _, deltas = case.ask()
    wait_until(lambda: not case.loop.is_alive)
    hold.set()
    wait_until(lambda: ended(deltas))
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_an_adapter_that_finds_no_slot_fails_its_request_in_time(tokenizer):
    case = Case(tokenizer, wait_s=0.1)
    _, waiting = case.ask(adapter="sql")
    _, base = case.ask()
    wait_until(lambda: ended(waiting) and ended(base))
    assert base[-1].finish_reason is FinishReason.LENGTH
    assert waiting[-1].finish_reason is FinishReason.ERROR
    assert waiting[-1].retryable
    assert "'sql'" in waiting[-1].error
    wait_until(lambda: case.residencies.kept == 0)
    wait_sound(case)
    case.loop.close()
    case.compilations.close()


def test_bad_logits_fail_one_request(case):
    case.runner.bad_prompts.add((9, 9))
    _, bad = case.ask((9, 9))
    _, good = case.ask((9, 8))
    wait_until(lambda: ended(bad) and ended(good))
    assert (bad[-1].finish_reason, bad[-1].retryable) == (FinishReason.ERROR, False)
    assert bad[-1].token_ids == ()
    assert good[-1].finish_reason is FinishReason.LENGTH


def test_a_step_that_the_server_failed_ends_its_adapters_requests_only(case):
    case.residencies.slot, case.residencies.affected = 0, frozenset({"digest of sql"})
    affected, other, base, asked, go_on = [], [], [], threading.Event(), threading.Event()
    all_run = held_from(lambda: len(affected) > 2 and other and base, go_on)
    case.runner.trouble = lambda plan: asked.wait(60) and all_run(plan)
    case.ask((5, 6, 7), adapter="sql", max_tokens=60, on_output=affected.append)
    case.ask((5, 6, 8), adapter="law", max_tokens=30, on_output=other.append)
    case.ask(max_tokens=30, on_output=base.append)
    asked.set()
    wait_until(lambda: len(affected) > 2 and other and base)
    case.runner.status = "one rank did not answer"
    go_on.set()
    wait_until(lambda: ended(affected))
    case.runner.status = None
    assert (affected[-1].finish_reason, affected[-1].retryable) == (FinishReason.ERROR, True)
    assert "LoRA Server" in affected[-1].error
    assert affected[-1].token_ids == ()
    wait_until(lambda: ended(base) and ended(other))
    for deltas in (base, other):
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert [token for delta in deltas for token in delta.token_ids] == [70] * 30
    wait_until(lambda: case.residencies.kept == 0)
    wait_sound(case)


def test_those_that_can_be_served_without_the_server_go_on_and_lose_no_token(case):
    case.residencies.slot, case.residencies.affected = 0, frozenset({"digest of sql"})
    case.residencies.here = case.residencies.affected
    affected, go_on = [], threading.Event()
    case.runner.trouble = held_from(lambda: len(affected) > 2, go_on)
    case.ask((5, 6, 7), adapter="sql", max_tokens=40, on_output=affected.append)
    _, scored = case.ask((5, 6, 9), adapter="sql", max_tokens=40, prompt_logprobs=0)
    wait_until(lambda: len(affected) > 2)
    case.runner.status = "one rank did not answer"
    go_on.set()
    wait_until(lambda: case.residencies.asked > 2)
    case.runner.status = None
    wait_until(lambda: ended(affected) and ended(scored))
    assert affected[-1].finish_reason is FinishReason.LENGTH
    assert [token for delta in affected for token in delta.token_ids] == [70] * 40
    wait_until(lambda: case.residencies.kept == 0)
    wait_sound(case)


def test_a_callback_that_raises_loses_only_its_own_request(case):
    calls = []

    def broken(delta):
        calls.append(delta)
        raise ValueError("no")

    _, good = case.ask(max_tokens=20)
    case.ask(on_output=broken, n=2)
    wait_until(lambda: ended(good))
    assert good[-1].finish_reason is FinishReason.LENGTH
    # Steps are short: the good request may have ended before the other one came.
    wait_until(lambda: sum(delta.finish_reason is not None for delta in calls) == 2)
    assert case.loop.is_alive
    wait_until(lambda: not case.loop.scheduler_stats().num_running)
    wait_sound(case)


def test_a_stop_string_frees_the_row(case):
    text = case.tokenizer.decode([70])
    _, deltas = case.ask(max_tokens=50, stop=text * 2)
    wait_until(lambda: ended(deltas))
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, text * 2)
    wait_until(lambda: not case.loop.scheduler_stats().num_running)
    assert sum(len(delta.token_ids) for delta in deltas) == 2


def test_aborts_reach_waiting_and_running_requests(case):
    running, go_on = [], threading.Event()
    case.runner.trouble = held_from(lambda: running, go_on)
    running_id, _ = case.ask(max_tokens=60, on_output=running.append)
    waiting_id, waiting = case.ask(adapter="sql", n=2)
    wait_until(lambda: running)
    for request_id in (running_id, waiting_id, waiting_id, "unknown"):
        case.loop.abort(request_id)
    go_on.set()
    wait_until(lambda: ended(running) and len(waiting) == 2)
    ends = [*running[-1:], *waiting]
    assert {delta.finish_reason for delta in ends} == {FinishReason.ABORT}
    wait_until(lambda: case.residencies.kept == 0)
    wait_sound(case)


def test_a_late_abort_ends_no_later_request_of_the_same_id(case):
    """It is asked for while the first request runs, and still queued when the second comes."""
    later, read = [], case.runner.read

    def read_late(step):
        if not later:
            case.loop.abort("twice")
        return read(step)

    def on_output(delta):
        if delta.finish_reason is not None:
            later.append(case.ask(name="twice")[1])

    case.runner.read = read_late
    case.ask(name="twice", max_tokens=1, on_output=on_output)
    wait_until(lambda: later and ended(later[0]))
    assert later[0][-1].finish_reason is FinishReason.LENGTH
    wait_sound(case)


@pytest.mark.parametrize("way", ["length", "stop", "abort"])
def test_a_caller_that_has_the_end_finds_its_adapters_memory_free(case, way):
    """Before: its next request with another adapter could be refused for a moment."""
    case.residencies.slot, kept = 0, []

    def on_output(delta):
        if delta.finish_reason is not None:
            kept.append((str(delta.finish_reason), case.residencies.kept))
        elif way == "abort":
            case.loop.abort(request_id)

    stop = {"stop": case.tokenizer.decode([70]) * 2} if way == "stop" else {}
    asked = threading.Event()
    case.runner.trouble = lambda plan: asked.wait(60)
    request_id, _ = case.ask(adapter="sql", on_output=on_output, max_tokens=50, **stop)
    asked.set()
    wait_until(lambda: kept)
    assert kept == [(way, 0)]
    wait_sound(case)


def test_a_full_queue_refuses_without_a_trace(case):
    ids = [case.ask(adapter="sql", n=2)[0] for _ in range(3)]
    with pytest.raises(QueueFull):
        case.ask(adapter="sql")
    assert case.residencies.kept == 3
    for request_id in ids:
        case.loop.abort(request_id)
    wait_until(lambda: case.residencies.kept == 0)


def test_the_registry_is_followed(case):
    wait_until(lambda: case.residencies.changes == [])
    case.registry.names = ["law", "sql"]
    case.registry.generation += 1
    case.loop.wake()
    wait_until(lambda: [name for name, _ in case.residencies.changes] == ["law", "sql"])
    value = case.metrics.registry.get_sample_value
    assert value("lora_jax:adapter_requests_total", {"adapter": "law"}) == 0.0


def test_a_caller_has_its_answer_before_it_is_counted_which_is_soon(case, monkeypatch):
    """Counting takes as long as all the rest of a short answer."""
    counted, before = threading.Event(), []
    monkeypatch.setattr(case.metrics, "request_done", lambda one: counted.set())
    case.ask(max_tokens=1, on_output=lambda delta: before.append(not counted.is_set()))
    assert counted.wait(60), "an idle engine counts what is left"
    assert before == [True]
