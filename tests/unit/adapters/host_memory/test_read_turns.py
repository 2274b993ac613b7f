"""Reads side by side: each name once, few at once, earliest deadline first."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import wait_until

from lora_jax.adapters.host_memory.read_turns import ReadTurns


class Reader:
    """A thread that reads a name until it may end."""

    def __init__(self, turns, name, begun, deadline=float("inf")):
        self.may_end = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(turns, name, begun, deadline))
        self.thread.start()

    def run(self, turns, name, begun, deadline):
        with turns.turn(name, deadline):
            begun.append(name)
            assert self.may_end.wait(20)

    def end(self):
        self.may_end.set()
        self.thread.join(20)


def test_names_are_read_side_by_side_and_the_same_name_once():
    turns, begun = ReadTurns(3), []
    readers = [Reader(turns, name, begun) for name in ("a", "a", "b")]
    wait_until(lambda: sorted(begun) == ["a", "b"])
    time.sleep(0.02)
    assert sorted(begun) == ["a", "b"]
    for reader in readers:
        reader.may_end.set()
    for reader in readers:
        reader.end()
    assert sorted(begun) == ["a", "a", "b"]


def test_the_earliest_deadline_begins_first():
    turns, begun = ReadTurns(1), []
    first = Reader(turns, "first", begun)
    wait_until(lambda: begun == ["first"])
    others = []
    for name, deadline in (("late", 9.0), ("never", float("inf")), ("soon", 1.0)):
        others.append(Reader(turns, name, begun, deadline))
        wait_until(lambda: len(turns._waiting) == len(others))
    for reader in others:
        reader.may_end.set()
    first.end()
    for reader in others:
        reader.end()
    assert begun == ["first", "soon", "late", "never"]


def test_a_thread_may_take_its_name_again_and_errors_give_it_back():
    turns = ReadTurns(1)
    with pytest.raises(ValueError, match="broken"), turns.turn("a"), turns.turn("a"):
        raise ValueError("broken")
    with turns.turn("a"):
        pass
    assert not turns._reading
    assert not turns._waiting


def test_of_two_turns_that_end_at_once_both_are_taken():
    """The later deadline looks first, and again when the earlier one has begun."""
    turns, both = ReadTurns(2), threading.Barrier(2)
    with turns._changed:
        turns._reading.update(one=0, two=0)

    def read(name, deadline):
        with turns.turn(name, deadline):
            both.wait(20)

    with ThreadPoolExecutor(2) as pool:
        reads = []
        for count, (name, deadline) in enumerate({"late": 2.0, "early": 1.0}.items(), 1):
            reads.append(pool.submit(read, name, deadline))
            wait_until(lambda count=count: len(turns._waiting) == count)
        with turns._changed:
            turns._reading.clear()
            turns._changed.notify_all()
        for one in reads:
            one.result(60)
