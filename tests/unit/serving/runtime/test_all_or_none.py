"""All calls succeed, or those that wait are ended and the first error is raised."""

import concurrent.futures
import threading

import pytest

from serving.runtime import all_or_none as module
from serving.runtime.all_or_none import all_or_none


def test_it_returns_when_all_have():
    done = []
    all_or_none([lambda n=n: done.append(n) for n in range(3)], pytest.fail)
    assert sorted(done) == [0, 1, 2]
    all_or_none([], pytest.fail)


def test_an_error_ends_the_waits_of_others():
    ended = threading.Event()

    def wait():
        assert ended.wait(30), "it was not ended"
        raise ConnectionError("ended by the other")

    def fail():
        raise ConnectionError("the cause")

    with pytest.raises(ConnectionError, match="the cause"):
        all_or_none([wait, fail], ended.set)


def test_a_signal_ends_them_too(monkeypatch):
    ended = threading.Event()

    def interrupted(futures, return_when):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.concurrent.futures, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        all_or_none([lambda: ended.wait(5)], ended.set)
    assert concurrent.futures.wait is interrupted
    assert ended.is_set()
