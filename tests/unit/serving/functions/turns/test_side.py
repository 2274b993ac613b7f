"""A function's side of its turns: asks, more requests meanwhile, and an agent that has gone."""

import socket
import threading
from types import SimpleNamespace

import pytest

from serving.functions.policies.batching import PrefillTime
from serving.functions.turns import side as turn_side
from serving.functions.turns.messages import (
    ALONE,
    ASK_FIELDS,
    BACK_FIELDS,
    ENDED,
    FOLLOW,
    GRANT,
    RECALL,
    word,
)
from serving.functions.turns.side import TurnSide
from serving.functions.turns.table import NEVER_S


def never() -> bool:
    return False


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)
    with ours, theirs:
        yield ours, TurnSide(theirs, 1.0, 2)


def asked(agent: socket.socket) -> list[float]:
    return list(ASK_FIELDS.unpack(agent.recv(99))[1:])


def given_back(agent: socket.socket) -> tuple[bool, list[float]]:
    """Return whether a step still runs, and the stamps."""
    _, runs, *stamps = BACK_FIELDS.unpack(agent.recv(99))
    return runs, stamps


def test_a_turn_is_taken_asked_back_and_given_back(pair):
    agent, side = pair
    agent.send(word(RECALL))  # of a turn that was given back before it came
    agent.send(word(GRANT))
    side.take(list, never)
    slo_s, waited_s, _, leaves_s = asked(agent)
    assert (slo_s, waited_s, leaves_s) == (1.0, 0.0, 1.0)
    side.take(list, never)  # it has the device already
    assert not side.is_due
    agent.send(word(RECALL))
    assert side.is_due
    side.give_back()
    side.give_back()
    runs, (heard, began, noticed, passed) = given_back(agent)
    assert not runs
    assert 0 == began < heard <= noticed <= passed
    assert not side.is_due
    agent.setblocking(False)
    with pytest.raises(BlockingIOError):  # it is told once
        agent.recv(99)


def test_a_turn_is_passed_on_behind_a_step_and_ends_when_that_was_read(pair):
    agent, side = pair
    side.pass_on()  # there is no turn
    agent.send(word(GRANT))
    side.take(list, never)
    asked(agent)
    side.dispatched()
    side.dispatched()
    agent.send(word(RECALL))
    assert side.is_due
    side.pass_on()
    runs, (heard, began, noticed, passed) = given_back(agent)
    assert runs
    assert heard <= began <= noticed <= passed
    assert not side.is_due
    side.give_back()
    side.give_back()
    assert agent.recv(99) == ENDED
    agent.setblocking(False)
    with pytest.raises(BlockingIOError):
        agent.recv(99)


def test_a_request_that_comes_during_the_wait_is_asked_for_at_once(pair, monkeypatch):
    now = 100.0
    monkeypatch.setattr(turn_side, "_LOOK_S", 60.0)
    monkeypatch.setattr(turn_side, "time", SimpleNamespace(monotonic=lambda: now))
    agent, side = pair
    arrivals = [now - 0.25]
    thread = threading.Thread(target=side.take, args=(lambda: list(arrivals), never))
    thread.start()
    _, waited_s, _, leaves_s = asked(agent)
    assert waited_s == 0.25
    assert leaves_s == pytest.approx(1.0 - 0.25 - turn_side._FIRST_S)
    arrivals.append(now)
    side.look()
    _, waited_s, _, leaves_s = asked(agent)
    assert waited_s == 0.25
    # Two are the largest batch, which interrupts nobody before it must run.
    assert leaves_s == pytest.approx(1.0 - 0.25 - turn_side._FIRST_S)
    agent.send(word(GRANT))
    thread.join(60)
    assert not thread.is_alive()


def test_work_that_nobody_waits_for_asks_for_a_free_device_and_makes_way(pair):
    agent, side = pair
    assert not side.take_idle(lambda: True)  # a call has come
    slo_s, _, _, leaves_s = asked(agent)
    assert slo_s == leaves_s == NEVER_S
    agent.send(word(GRANT))
    assert side.take_idle(never)
    asked(agent)
    assert side.take_idle(never)  # it has the device already
    side.give_back()
    assert not given_back(agent)[0]


def test_a_turn_that_comes_after_its_ask_was_given_up_is_given_back(pair):
    """The function loads an adapter meanwhile, and others would wait for their limit of time."""
    agent, side = pair
    assert not side.take_idle(lambda: True)
    asked(agent)
    agent.send(word(GRANT))
    side.give_back()
    agent.setblocking(False)
    assert not given_back(agent)[0]
    side.give_back()
    with pytest.raises(BlockingIOError):
        agent.recv(99)


def test_a_side_that_is_closed_leaves_its_turn_to_others(pair):
    agent, side = pair
    agent.send(word(GRANT))
    side.take(list, never)
    asked(agent)
    side.close()
    agent.setblocking(False)
    assert agent.recv(99) == b""
    side.look()
    side.give_back()
    side.take(list, never)
    assert side.take_idle(never)  # nobody is asked any more
    assert not side.is_due


def test_the_end_of_the_engine_or_of_the_agent_ends_the_wait(pair):
    agent, side = pair
    side.take(list, lambda: True)
    agent.close()
    side.take(list, never)
    assert not side.is_due
    side.give_back()


def test_prefill_times_are_fitted_to_what_ran(pair):
    _, side = pair
    side.ran(0, 1.0, 6.0)  # no prompt ended in it
    side.ran(1, 1.0, 1.125)
    assert side._prefill == PrefillTime(0.125, 0.0)
    side.ran(3, 1.0, 1.25)
    assert side._prefill.base_s == pytest.approx(0.125)
    assert side._prefill.slope_s == pytest.approx(0.0625)


def test_of_the_time_beside_anothers_last_step_half_counts(pair):
    agent, side = pair
    agent.send(word(FOLLOW))
    side.take(list, never)
    agent.send(word(ALONE, 1.5))
    side.ran(1, 1.0, 2.0)
    assert side._measured.pop() == (1, 0.75)
    side.ran(1, 2.0, 3.0)
    assert side._measured.pop() == (1, 1.0)
    side.give_back()
    agent.send(word(FOLLOW))  # and its end is not heard of
    side.take(list, never)
    side.ran(1, 1.0, 2.0)
    assert side._measured.pop() == (1, 0.5)


def test_a_prefill_whose_turn_was_passed_on_has_half_of_the_device_from_then_on(pair, monkeypatch):
    """One that is longer than a turn ends no other way while others ask."""
    agent, side = pair
    agent.send(word(GRANT))
    side.take(list, never)
    monkeypatch.setattr(turn_side, "time", SimpleNamespace(monotonic=lambda: 2.5))
    side.pass_on()
    side.ran(1, 1.0, 3.0)
    assert side._measured.pop() == (1, 1.75)
    side.ran(1, 2.75, 3.0)  # dispatched by a clock that read later
    assert side._measured.pop() == (1, 0.125)
    side.give_back()
    agent.send(word(FOLLOW))
    side.take(list, never)
    side.pass_on()
    side.ran(1, 1.0, 3.0)  # beside others from its beginning to its end
    assert side._measured.pop() == (1, 1.0)
