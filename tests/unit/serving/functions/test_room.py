"""Functions under one limit of memory: who leaves, and what is said when nobody may."""

import threading
from types import SimpleNamespace

import pytest

from serving.functions.handle import DeviceFull, Function
from serving.functions.policies.predict import Arrivals
from serving.functions.room import Room


class Held:
    """A function as the room sees it; `arrivals` one second apart give it a rate."""

    def __init__(self, name, *, calls=1, busy=False, state="running", leaves=True):
        self.name, self.state, self._leaves = name, state, leaves
        self.arrivals = Arrivals(float(n) for n in range(calls))
        about = {"start_s": 1.0}
        idle = SimpleNamespace(about=about, is_idle=not busy)
        self.running = idle if state == "running" else None
        self.is_offloaded = state == "off"
        self.starts = int(state in ("running", "off"))

    def offload(self):
        self.state = "off" if self._leaves else self.state
        return self._leaves


def room_of(limit, *functions):
    room = Room(limit)
    for function in functions:
        room.grown(function.name, 10)
        room.ready(function.name, 1.0)
    return room, {function.name: function for function in functions}


def test_the_idle_function_of_least_value_leaves():
    rare, often = Held("rare"), Held("often", calls=4)
    room, functions = room_of(25, often, rare)
    room.make("new", functions)
    assert (rare.state, often.state) == ("off", "running")
    Room(None).make("new", functions)
    assert often.state == "running"


def test_nobody_leaves_while_there_is_room():
    one = Held("one")
    room, functions = room_of(20, one)
    room.make("new", functions)
    assert one.state == "running"


def test_what_a_process_has_grown_to_counts_for_the_next_one_too():
    one = Held("one")
    room, functions = room_of(25, one)
    room.grown("one", 16)
    room.grown("one", 11)
    room.make("new", functions)
    assert one.state == "off"  # 16 and 16 are too much


def test_a_full_device_is_named():
    room, functions = room_of(15, Held("busy", busy=True))
    with pytest.raises(DeviceFull, match=r"no room for function 'new' within .* 15: 5 bytes are"):
        room.make("new", functions)
    room, functions = room_of(15, Held("called", leaves=False))
    with pytest.raises(DeviceFull, match="are called; try again"):
        room.make("new", functions)


def test_a_start_that_was_let_in_holds_its_room_and_one_that_was_not_holds_none():
    first, second = Held("first", state="starting"), Held("second", state="starting")
    room, functions = room_of(15, first, second)
    room.make("first", functions)
    with pytest.raises(DeviceFull):
        room.make("second", functions)


def test_of_two_that_start_at_once_and_both_ran_before_one_gets_the_room():
    """What an earlier process of a function was let in for is not held while it waits again."""
    first, second = Held("first", state="starting"), Held("second", state="starting")
    room, functions = room_of(15, first, second)
    for function in (first, second):
        room.make(function.name, {function.name: function})
        function.starts = 1  # it ran, and was offloaded
    room.make("first", functions)
    with pytest.raises(DeviceFull):
        room.make("second", functions)
    room.failed("first")
    room.make("second", functions)


def test_ahead_of_calls_the_best_are_started_in_what_nobody_uses():
    """4 calls, one a second: 2 s later the next one is expected, and 1000 s later no more."""
    busy, idle = Held("busy", busy=True, calls=4), Held("idle", calls=1)
    often, slow = Held("often", state="off", calls=4), Held("slow", state="off", calls=4)
    room, functions = room_of(25, busy, idle, often, slow)
    room.ready("slow", 5.0)
    assert room.worth_starting(functions, 5.0) == ["slow"]
    assert room.worth_starting(functions, 1000.0) == []
    busy.running.is_idle = True  # and expected itself: it keeps its room
    assert room.worth_starting(functions, 5.0) == ["slow"]
    assert Room(10).worth_starting({"busy": Held("busy", busy=True)}, 5.0) == []
    assert set(Room(None).worth_starting(functions, 5.0)) == {"often", "slow"}


def test_a_call_without_room_fails_and_the_next_one_tries_again():
    full, tries = threading.Event(), []
    full.set()

    def start():
        tries.append(1)
        if full.is_set():
            raise DeviceFull("no room")
        raise ValueError("it was tried")

    function = Function("f", start, lazy=True)
    with pytest.raises(DeviceFull, match="no room"):
        function.warm()
    full.clear()
    with pytest.raises(ConnectionError, match="it was tried"):
        function.warm()
    assert len(tries) == 2
    function.close()


def test_what_others_hold_by_now_is_seen_before_room_is_made():
    """A process may have taken more than it has ever said."""
    one = Held("one", busy=True)
    room = Room(25, lambda function: 20)
    room.grown("one", 10)
    with pytest.raises(DeviceFull):
        room.make("new", {"one": one})
    room = Room(25, lambda function: 5)
    room.grown("one", 10)
    room.make("new", {"one": one})
