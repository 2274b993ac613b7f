"""A function's side of its turns: asks, more requests meanwhile, and an agent that has gone."""

import socket
import threading
import time

import pytest

from serving.functions.policies.batching import PrefillTime
from serving.functions.turn_keeper import ASK_FIELDS, BACK, GRANT, RECALL
from serving.functions.turn_side import TurnSide
from serving.functions.turn_table import NEVER_S


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


def test_a_turn_is_taken_asked_back_and_given_back(pair):
    agent, side = pair
    agent.send(RECALL)  # of a turn that was given back before it came
    agent.send(GRANT)
    side.take(list, never)
    slo_s, waited_s, _, leaves_s = asked(agent)
    assert (slo_s, waited_s, leaves_s) == (1.0, 0.0, 1.0)
    side.take(list, never)  # it has the device already
    assert not side.is_due
    agent.send(RECALL)
    assert side.is_due
    side.give_back()
    side.give_back()
    assert agent.recv(9) == BACK
    assert not side.is_due


def test_a_batch_that_fills_while_it_waits_is_asked_for_again(pair):
    agent, side = pair
    now = time.monotonic()
    arrivals = [now - 0.25]
    thread = threading.Thread(target=side.take, args=(lambda: list(arrivals), never))
    thread.start()
    _, waited_s, _, leaves_s = asked(agent)
    assert waited_s >= 0.25
    assert leaves_s <= 0.75
    arrivals.append(now)
    _, _, _, leaves_s = asked(agent)  # two are the largest batch: it leaves at once
    assert leaves_s <= 0
    agent.send(GRANT)
    thread.join(60)
    assert not thread.is_alive()


def test_work_that_nobody_waits_for_asks_for_a_free_device_and_makes_way(pair):
    agent, side = pair
    assert not side.take_idle(lambda: True)  # a call has come
    slo_s, _, _, leaves_s = asked(agent)
    assert slo_s == leaves_s == NEVER_S
    agent.send(GRANT)
    assert side.take_idle(never)
    asked(agent)
    assert side.take_idle(never)  # it has the device already
    side.give_back()
    assert agent.recv(9) == BACK


def test_the_end_of_the_engine_or_of_the_agent_ends_the_wait(pair):
    agent, side = pair
    side.take(list, lambda: True)
    agent.close()
    side.take(list, never)
    assert not side.is_due
    side.give_back()


def test_prefill_times_are_fitted_to_what_ran(pair):
    _, side = pair
    side.ran(0, 5.0)  # no prompt ended in it
    side.ran(1, 0.1)
    assert side._prefill == PrefillTime(0.1, 0.0)
    side.ran(3, 0.2)
    assert side._prefill.base_s == pytest.approx(0.1)
    assert side._prefill.slope_s == pytest.approx(0.05)
