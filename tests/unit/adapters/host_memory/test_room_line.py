"""Requests that wait for host memory: their order, and what wakes them."""

import contextlib
import threading

import pytest

from lora_jax.adapters.host_memory.room_line import RoomLine, wait_in_line
from lora_jax.adapters.registry_errors import HostFull


class Waits:
    """A line with a clock of its own, and what it has woken."""

    def __init__(self):
        self.now, self.woken = 0.0, []
        self.line = RoomLine(lambda: self.now)
        self.stack = contextlib.ExitStack()

    def ticket(self, name, **options):
        wake = lambda: self.woken.append(name)  # noqa: E731
        return self.stack.enter_context(self.line.ticket(wake, **options))

    def take_woken(self):
        woken, self.woken = self.woken, []
        return woken


@pytest.fixture
def waits():
    made = Waits()
    with made.stack:
        yield made


def test_the_earliest_deadline_is_first_and_alone_is_woken(waits):
    line = waits.line
    late, early, last = (waits.ticket(n, deadline=d) for n, d in (("a", 5), ("b", 3), ("c", 9)))
    for ticket, name in ((late, "a"), (early, "b"), (late, "a")):
        line.enter(ticket, name)
    assert len(line) == 2
    assert [line.must_wait(ticket) for ticket in (early, late, last, None)] == [
        False,
        True,
        True,
        False,
    ]
    line.changed()
    assert waits.take_woken() == ["b"]
    line.leave(early)
    assert waits.take_woken() == ["a"]
    last.seen = line.num_changes
    line.enter(last, "b")
    line.arrived("b")
    assert waits.take_woken() == ["c"]


def test_callers_take_turns_and_a_late_one_does_not_wait_for_a_flood(waits):
    line, tickets = waits.line, {}
    for name in ("a1", "a2", "a3", "b1", "a4", "b2"):
        tickets[name] = waits.ticket(name, owner=name[0])
        line.enter(tickets[name], name)
    served = []
    while line._waiting:
        served.append(line._waiting[0].name)
        line.leave(tickets[served[-1]])
        if served[-1] == "b1":
            tickets["c1"] = waits.ticket("c1", owner="c")
            line.enter(tickets["c1"], "c1")
    assert served == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_line_is_too_long_for_callers_with_more_than_their_part(waits):
    line, tickets = waits.line, {}
    for name in ("a1", "a2", "a3", "a4"):
        tickets[name] = waits.ticket(name, owner=name[0])
        line.enter(tickets[name], name)
        assert line.is_too_long(tickets[name], 3) == (name == "a4")
    other = waits.ticket("b1", owner="b")
    line.enter(other, "b1")
    assert not line.is_too_long(other, 3)
    assert [line.is_too_long(tickets[name], 3) for name in tickets] == [False, True, True, True]


def test_a_request_that_has_left_for_good_does_not_come_back(waits):
    with waits.line.ticket(lambda: None) as ticket:
        waits.line.enter(ticket, "a")
        assert len(waits.line) == 1
    waits.line.enter(ticket, "a")  # by a thread of a canceled request
    assert not len(waits.line)


def test_room_that_came_between_an_attempt_and_the_line_wakes(waits):
    ticket = waits.ticket("a")
    ticket.seen = waits.line.num_changes
    waits.line.changed()
    waits.line.enter(ticket, "a")
    assert waits.take_woken() == ["a"]


def test_after_half_of_its_time_the_first_one_closes_adapters_to_later_requests(waits):
    line = waits.line
    first, later = waits.ticket("a", wait_s=10), waits.ticket("b", wait_s=10)
    waits.now = 1.0
    line.enter(first, "a")
    waits.now = 5.9
    line.drain(first, frozenset({"busy"}))
    assert not line.is_closed("busy", later)
    waits.now = 6.0
    line.drain(later, frozenset({"other"}))  # which is not the first
    line.drain(first, frozenset({"busy"}))
    assert [line.is_closed(d, later) for d in ("busy", "other")] == [True, False]
    assert not line.is_closed("busy", first)
    line.enter(later, "busy")
    line.leave(first)
    assert not line.is_closed("busy", later)
    assert waits.take_woken() == ["b", "b"]


def test_a_thread_waits_until_an_attempt_finds_room():
    line, in_line, tries = RoomLine(), threading.Event(), []

    def attempt(ticket):
        tries.append(ticket)
        if len(tries) == 1:
            line.enter(ticket, "a")
            in_line.set()
            raise HostFull("full.")
        return "entry"

    found = []
    thread = threading.Thread(target=lambda: found.append(wait_in_line(line, attempt, 60.0)))
    thread.start()
    assert in_line.wait(30)
    line.changed()
    thread.join(30)
    assert found == ["entry"]
    assert tries[0] is tries[-1]
    assert not len(line)


def test_a_line_that_closes_lets_nobody_wait():
    """Those that wait are told, and who comes later is told at once."""
    line, in_line, told = RoomLine(), threading.Event(), []

    def attempt(ticket):
        line.enter(ticket, "a")
        in_line.set()
        raise HostFull("full.")

    def wait():
        with pytest.raises(HostFull, match=r"^The engine has stopped") as caught:
            wait_in_line(line, attempt, 600.0)
        told.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    assert in_line.wait(30)
    line.close()
    thread.join(30)
    wait()
    assert len(told) == 2


def test_a_wait_that_is_over_says_how_long_it_was():
    def attempt(ticket):
        raise HostFull("full.")

    with pytest.raises(HostFull, match=r"full\. The request has waited for 0\.01 s\."):
        wait_in_line(RoomLine(), attempt, 0.01)
    with pytest.raises(HostFull, match=r"^full\.$"):
        wait_in_line(RoomLine(), attempt, 0.0)
