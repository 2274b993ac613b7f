"""The handle of a process elsewhere: told of its end by Ray, or by silence. Ray is a stand-in."""

import multiprocessing.connection
import signal
import threading
import time

import pytest

ray = pytest.importorskip("ray")

from serving.cluster.far import process as far_process  # noqa: E402
from serving.cluster.ray import process as module  # noqa: E402
from serving.cluster.ray.process import RayProcess  # noqa: E402


class Call:
    """A call that is answered when the test says so."""

    def __init__(self):
        self.done, self.answer = threading.Event(), None

    def remote(self, *args):
        self.args = args
        return self

    def get(self, timeout=None):
        if not self.done.wait(timeout):
            raise ray.exceptions.GetTimeoutError("silent")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def say(self, answer):
        self.answer = answer
        self.done.set()


class Actor:
    def __init__(self):
        self.run, self.is_at_work, self.kills, self.dies = Call(), Call(), 0, True

    def kill(self):
        self.kills += 1
        if self.dies:
            self.run.say(ray.exceptions.RayActorError())


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda call, timeout=None: call.get(timeout))
    monkeypatch.setattr(ray, "kill", lambda one, no_restart: one.kill())
    monkeypatch.setattr(far_process, "_KILL_S", 60.0)  # a late watch is no lost host
    monkeypatch.setattr(module, "_ANSWER_S", 0.1)
    made, before = Actor(), {*threading.enumerate()}
    yield made
    made.run.say(0)
    for thread in {*threading.enumerate()} - before:  # they would ask Ray itself
        thread.join(60)


@pytest.fixture
def process(actor):
    told = []
    made = RayProcess(actor, b"call", {"A": "b"}, told.append)
    made.start()
    assert actor.run.args == (b"call", {"A": "b"})
    yield made, told
    made.kill()
    made.join(60)
    made.close()
    made.close()
    with pytest.raises(ValueError, match="closed"):
        _ = made.sentinel


def test_an_end_is_told_at_once_with_its_status(actor, process):
    made, told = process
    assert (made.is_alive(), made.exitcode) == (True, None)
    assert not multiprocessing.connection.wait([made.sentinel], 0)
    actor.run.say(75)
    assert multiprocessing.connection.wait([made.sentinel], 60)
    made.join(60)
    assert (made.is_alive(), made.exitcode, told) == (False, 75, [False])


def test_a_kill_ends_the_actor_and_the_host_is_not_lost(actor, process):
    made, told = process
    made.kill()
    made.join(60)
    assert (made.exitcode, actor.kills) == (-signal.SIGKILL, 1)
    assert told == [False]


def test_a_host_that_does_not_answer_is_lost(actor, process, monkeypatch):
    monkeypatch.setattr(far_process, "_KILL_S", 0.2)
    made, told = process
    actor.dies = False
    assert not made.is_at_work()
    began = time.monotonic()
    made.kill()
    made.join(60)
    assert time.monotonic() - began >= 0.2
    assert (made.exitcode, told) == (-signal.SIGKILL, [True])
    actor.run.say(0)  # late news change nothing
    assert made.exitcode == -signal.SIGKILL


def test_it_asks_whether_the_process_computes(actor, process):
    actor.is_at_work.say(True)
    assert process[0].is_at_work()
