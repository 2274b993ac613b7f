"""A process that is stopped, asleep for ever or unwell is replaced; one that computes is not."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
from support.waiting import wait_until

from serving.runtime import keeper
from serving.runtime.child_process import AbstractChild, Pulse, is_at_work
from serving.runtime.keeper import Keeper, end_keepers


def echo(connection):
    """Answer each question, until told otherwise."""
    asleep, works = False, []
    signal.signal(signal.SIGUSR1, lambda *_: works.clear())
    while True:
        try:
            said = connection.recv_bytes()
        except EOFError:
            return
        if said == b"spin":
            works.append(said)
            while works:
                pass
        asleep = asleep or said == b"sleep"
        if not asleep:
            connection.send_bytes(said)


class Child(AbstractChild):
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        process = context.Process(target=echo, args=(theirs,), daemon=True)
        super().__init__(process, 30.0)
        theirs.close()
        self.says, self.asked = Pulse.UP, 0
        self.ask(60.0)
        self.is_ready = True

    def ask(self, limit_s):
        end, self.asked = time.monotonic() + limit_s, self.asked + 1
        wanted = b"%d" % self.asked
        self.connection.send_bytes(wanted)
        while self.connection.poll(max(0.0, end - time.monotonic())):
            if self.connection.recv_bytes() == wanted:
                return True
        return False

    def pulse(self, limit_s):
        try:
            return self.says if self.ask(limit_s) else Pulse.SILENT
        except (EOFError, OSError):
            return Pulse.SILENT

    def hang_up(self):
        self.connection.close()


class Role:
    """One place, and what its keeper did."""

    def __init__(self):
        self.child, self.replaced, self.told = Child(), [], []
        self.closing = threading.Event()
        self.keeper = Keeper(
            "role", lambda: self.child, self.replace, self.closing, self.told.append
        )

    def replace(self, dead):
        self.replaced.append(time.monotonic())
        dead.stop()
        self.child = Child()

    def wait_replaced(self, limit_s=60):
        end = time.monotonic() + limit_s
        while not self.replaced and time.monotonic() < end:
            time.sleep(0.01)
        assert self.replaced
        return self.replaced[0]

    def wait_up(self):
        end = time.monotonic() + 60
        while not (self.keeper.is_up and self.told and self.told[-1]):
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def role():
    made = Role()
    made.wait_up()
    yield made
    made.closing.set()
    end_keepers([made.keeper], lambda: [made.child])
    made.child.stop()


def test_a_stopped_process_is_found(role):
    """Before: never, as long as it was stopped. On a quiet machine it takes 3 s."""
    begun = time.monotonic()
    os.kill(role.child.pid, signal.SIGSTOP)
    assert role.wait_replaced() - begun < float(os.environ.get("HUNG_BAR_S", "25"))
    assert False in role.told
    role.wait_up()


def test_a_process_that_sleeps_for_ever_is_replaced(role):
    role.child.connection.send_bytes(b"sleep")
    role.wait_replaced()


def test_an_ended_process_is_replaced(role):
    os.kill(role.child.pid, signal.SIGKILL)
    role.wait_replaced()
    role.wait_up()


def test_a_process_that_computes_is_left_alone(role, monkeypatch):
    found, look = [], role.child.is_at_work
    monkeypatch.setattr(keeper, "_ANSWER_S", 0.3)  # the process takes a core for so long

    def look_and_end_it():
        found.append(look())
        os.kill(role.child.pid, signal.SIGUSR1)
        return found[-1]

    monkeypatch.setattr(role.child, "is_at_work", look_and_end_it)
    role.child.connection.send_bytes(b"spin")
    wait_until(lambda: found)
    assert False in role.told  # it takes no requests meanwhile
    role.wait_up()
    assert all(found)
    assert not role.replaced


def test_an_unwell_process_is_replaced_after_some_time(role, monkeypatch):
    monkeypatch.setattr(keeper, "_UNWELL_S", 1.0)
    role.child.says = Pulse.UNWELL
    role.wait_replaced()


def test_a_replacement_that_fails_is_tried_again(role, monkeypatch):
    tries = []

    def fail_once(dead):
        tries.append(dead)
        if len(tries) == 1:
            dead.stop()
            raise OSError("no descriptor")
        role.replace(dead)

    monkeypatch.setattr(role.keeper, "_replace", fail_once)
    role.child.kill()
    role.wait_replaced()
    assert len(tries) == 2


def test_at_work():
    assert is_at_work(os.getpid())
    child = Child()
    try:
        end = time.monotonic() + 60
        while is_at_work(child.pid):  # it may still be about to wait for a question
            assert time.monotonic() < end
    finally:
        child.stop()
    assert not is_at_work(child.pid)
