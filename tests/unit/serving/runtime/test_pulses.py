"""Pulses of a child process: late answers, an end during a start, and a start that hangs."""

import multiprocessing
import subprocess
import sys
import threading
import time
import types

import pytest
from support.processes.server_process import ROOT
from support.waiting import wait_until

from serving.runtime import pulses as module
from serving.runtime.pulses import Echo, Hung, Pulses, Starting, wait_alive

CHILD = """
import sys, threading
from multiprocessing.connection import Connection
from pathlib import Path
from serving.runtime.pulses import Echo

descriptor, path, early = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
echo = Echo(Connection(descriptor), path.unlink)
if not early:
    sys.stdin.read()  # until the test has closed the other side
with echo.ending_the_process():
    path.with_suffix(".waits").touch()
    threading.Event().wait(600)
"""


@pytest.fixture
def pair():
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        yield Pulses(ours), theirs


@pytest.mark.parametrize("early", [1, 0], ids=["while it waits", "before it waits"])
def test_a_process_that_waits_ends_with_the_other_side_of_its_pulses(tmp_path, early):
    left = tmp_path / "left"
    left.touch()
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-c", CHILD, str(theirs.fileno()), str(left), str(early)]
    child = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], text=True
    )
    theirs.close()
    try:
        assert Pulses(ours).answered(60)
        if early:
            wait_until(left.with_suffix(".waits").exists)
        ours.close()
        if not early:
            with pytest.raises(subprocess.TimeoutExpired):  # it would end in order
                child.wait(0.2)
        child.stdin.close()
        assert child.wait(60) == 1
    finally:
        child.kill()
        child.wait()
    assert not left.exists()


def test_a_process_that_waits_no_more_ends_in_order(monkeypatch):
    ended = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    ours, theirs = multiprocessing.Pipe()
    before = set(threading.enumerate())
    echo = Echo(theirs, lambda: ended.append("left"))
    (thread,) = set(threading.enumerate()) - before
    with echo.ending_the_process():
        assert Pulses(ours).answered(60)
    ours.close()
    thread.join(60)
    assert not thread.is_alive()
    assert not ended
    with echo.ending_the_process():
        assert ended == ["left", 1]
    theirs.close()


def test_a_process_that_cannot_remove_something_ends_too(monkeypatch):
    def leave():
        raise PermissionError("read-only")

    ended = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    ours, theirs = multiprocessing.Pipe()
    echo = Echo(theirs, leave)
    ours.close()
    wait_until(lambda: echo._has_ended)
    with pytest.raises(PermissionError), echo.ending_the_process():
        pass
    assert ended
    theirs.close()


def test_late_answers_do_not_count_and_questions_do_not_fill_the_connection(pair):
    pulses, end = pair
    assert not pulses.answered(0.0)
    end.send_bytes(b"1")
    assert not pulses.answered(0.05)
    end.send_bytes(b"2")
    end.send_bytes(b"3")
    assert pulses.answered(60)
    for _ in range(1000):
        assert not pulses.answered(0.0)
    asked = 0
    while end.poll(0):
        last, asked = end.recv_bytes(), asked + 1
    assert asked < 100
    end.send_bytes(last)
    assert pulses.answered(60)  # that one is still asked
    assert pulses.answered(0.0) is False
    end.close()
    assert not pulses.answered(60)


class Child:
    """A process that computes or does not."""

    def __init__(self, at_work):
        self.at_work, self.killed = at_work, 0

    def is_at_work(self):
        return self.at_work.pop(0) if self.at_work else False

    def kill(self):
        self.killed += 1


def answering(answers):
    left = list(answers)
    return types.SimpleNamespace(
        ask=lambda: None, has_heard=lambda limit_s: left.pop(0) if left else False
    )


def test_a_start_that_hangs_is_ended_and_one_that_computes_is_not(caplog):
    looks = []
    child = Child([True, True])
    pulses = answering([True, *[False] * 5, True])
    with pytest.raises(Hung, match="Rank 7 hangs"):
        wait_alive([Starting(child, "Rank 7", pulses)], looks.append, 60)
    assert child.killed == 1
    # An answer begins the count anew, and so do not looks at which it computes.
    assert len(looks) == 7 + module._SILENT_LOOKS + 2
    assert "Rank 7 hangs while it starts; it is killed." in caplog.text


def test_of_processes_that_start_together_the_one_that_hangs_is_ended(monkeypatch):
    """All of them are asked at once: silent ones share one wait."""
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    asked, waits = [], []

    def process(number, answers):
        def has_heard(limit_s):
            waits.append(limit_s)
            time.sleep(0.0 if answers else limit_s)
            return answers

        pulses = types.SimpleNamespace(ask=lambda: asked.append(number), has_heard=has_heard)
        return Starting(Child([]), f"Node {number}", pulses)

    processes = [process(number, answers=number < 2) for number in range(4)]
    with pytest.raises(Hung, match="Node 2 hangs while it starts"):
        wait_alive(processes, lambda seconds: False, 60)
    assert asked == [0, 1, 2, 3] * module._SILENT_LOOKS
    assert max(waits[3::4]) < 0.005  # what is left when the third one has been waited for
    assert [one.child.killed for one in processes] == [0, 0, 1, 0]


def test_a_start_that_answers_may_take_its_time():
    child, pulses, said = Child([]), answering([True] * 30), [False] * 30 + [True]
    starting = [Starting(child, "Rank 7", pulses)]
    assert wait_alive(starting, lambda seconds: said.pop(0), 60)
    assert not wait_alive(starting, lambda seconds: False, 0)
    begun = time.monotonic()
    assert not wait_alive([Starting(child, "Rank 7", answering([True] * 99))], _asleep, 0.05)
    assert time.monotonic() - begun >= 0.05
    assert not child.killed


def _asleep(seconds):
    time.sleep(seconds)
    return False
