"""The handle of a process that an actor runs: told of its end once, before anybody who waits."""

import multiprocessing.connection
import signal
import threading

import pytest

from serving.cluster.far import process as module
from serving.cluster.far.process import AbstractActorProcess


class Process(AbstractActorProcess):
    """Its actor runs until the test says with which status the process ends."""

    def __init__(self, ended):
        super().__init__(ended)
        self.status, self.over, self.ends = 0, threading.Event(), 0

    def is_at_work(self):
        return False

    def finish(self, status):
        self.status = status
        self.over.set()

    def _begin(self):
        return self.over

    def _status(self, running):
        assert running.wait(60)
        return self.status

    def _end_actor(self):
        self.ends += 1


def test_an_end_is_told_before_join_returns():
    is_told, may_go_on = threading.Event(), threading.Event()

    def told(is_lost):
        is_told.set()
        may_go_on.wait(60)

    made = Process(told)
    made.start()
    made.finish(75)
    assert is_told.wait(60)
    made.join(0.05)
    assert made.is_alive()
    may_go_on.set()
    made.join(60)
    assert (made.is_alive(), made.exitcode) == (False, 75)
    made.close()


def test_a_kill_that_nobody_answers_is_the_end_of_the_host(monkeypatch):
    monkeypatch.setattr(module, "_KILL_S", 0.05)
    told = []
    made = Process(told.append)
    made.start()
    assert not multiprocessing.connection.wait([made.sentinel], 0)
    made.kill()
    assert multiprocessing.connection.wait([made.sentinel], 60)
    assert (made.exitcode, told, made.ends) == (-signal.SIGKILL, [True], 1)
    made.finish(0)  # late news change nothing
    made.close()
    made.close()
    assert (made.exitcode, told, made.ends) == (-signal.SIGKILL, [True], 2)
    with pytest.raises(ValueError, match="closed"):
        _ = made.sentinel


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_fails_is_the_end_of_the_process(monkeypatch):
    """Else nobody who waits for it would ever go on."""
    may_fail, told, before = threading.Event(), [], {*threading.enumerate()}
    monkeypatch.setattr(Process, "_status", lambda made, running: may_fail.wait(60) and 1 // 0)
    made = Process(told.append)
    made.start()
    (watch,) = {*threading.enumerate()} - before
    may_fail.set()
    made.join(60)
    watch.join(60)  # its error is this test's
    assert (made.is_alive(), made.exitcode, told) == (False, -signal.SIGKILL, [False])
    made.close()
