"""Leases follow what live requests need, whatever the server says in between."""

import queue
import threading

import pytest

from serving.lora_server.coordinator import Lease, NoRoom
from serving.lora_server.leases import Leases


class Source:
    """Answers as it is told to; `gate` holds every answer back while it is clear."""

    def __init__(self):
        self.leased, self.left, self.faults, self.asked = {}, [], [], 0
        self.gate = threading.Event()
        self.gate.set()

    def lease(self, instance, digest, folder):
        assert self.gate.wait(30)
        self.asked += 1
        if self.faults:
            raise self.faults.pop(0)
        self.leased[digest] = folder
        return Lease(self.asked, self.asked)

    def release(self, instance, digest):
        self.leased.pop(digest, None)

    def leave(self, instance):
        self.left.append(instance)
        self.leased.clear()


class Marks(dict):
    """Knows how many keys it had at most."""

    most = 0

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.most = max(self.most, len(self))


class Work(queue.SimpleQueue):
    """Counts the waits that ended without work."""

    num_waits = 0

    def get(self, **options):
        try:
            return super().get(**options)
        except queue.Empty:
            self.num_waits += 1
            raise


class News:
    """Waits for a condition on what the thread of the leases does."""

    def __init__(self):
        self.condition = threading.Condition()

    def __call__(self):
        with self.condition:
            self.condition.notify_all()

    def until(self, true):
        with self.condition:
            for _ in range(3000):
                if true():
                    return
                self.condition.wait(0.01)
        raise AssertionError("it did not come true")


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def news():
    return News()


@pytest.fixture
def leases(source, news):
    made = Leases(source, "me", news)
    yield made
    source.gate.set()
    made.close()
    assert source.left == ["me"]


def test_a_lease_lives_as_long_as_the_requests(leases, source, news):
    leases.retain("d", "folder")
    leases.retain("d", "folder")
    news.until(lambda: leases.get("d") is not None)
    assert leases.get("d") == Lease(1, 1)
    assert source.leased == {"d": "folder"}
    leases.drop("d")
    assert leases.get("d") == Lease(1, 1)
    leases.drop("d")
    news.until(lambda: not source.leased)
    assert leases.get("d") is None
    assert source.asked == 1


def test_nobody_waits_for_an_answer(leases, source, news):
    source.gate.clear()
    leases.retain("d", "")
    assert leases.get("d") is None
    assert leases.digests == {"d"}
    source.gate.set()
    news.until(lambda: leases.get("d") is not None)


def test_one_without_room_is_asked_for_again_while_work_never_ends(leases, source, news):
    """A thread that only asks again where work stops for a while would never do it here."""
    stop = threading.Event()

    class Endless:
        """Gives work at once, always."""

        def __init__(self):
            self.put = leases._work.put

        def get(self, timeout=None):
            return None if stop.is_set() else "nobody's"

    source.faults = [NoRoom("full")] * 3
    source.gate.clear()
    leases.retain("d", "folder")
    leases._work = Endless()
    source.gate.set()
    try:
        news.until(lambda: leases.get("d") is not None)
    finally:
        stop.set()


def test_several_requests_ask_again_for_their_adapter_once(leases, source, news):
    source.gate.clear()
    source.faults = [NoRoom("full")] * 5
    later = leases._later = Marks()
    for _ in range(5):
        leases.retain("d", "folder")
    source.gate.set()
    news.until(lambda: leases.get("d") is not None)
    assert later.most == 1


def test_one_that_has_come_is_not_found_out_behind_all_that_have_not(source, news, monkeypatch):
    """Each wait before the next question would be for one of them: 200 take 0.6 s a round."""
    monkeypatch.setattr("serving.lora_server.leases.queue.SimpleQueue", Work)
    source.faults = [NoRoom("on its way")] * 400
    leases = Leases(source, "0", news)
    source.gate.clear()  # all of them ask before one asks again
    for number in range(200):
        leases.retain(f"d{number}", "")
    source.gate.set()
    news.until(lambda: all(leases.get(f"d{number}") for number in range(200)))
    leases.close()
    assert source.asked == 600
    assert leases._work.num_waits < 20


def test_without_room_it_is_asked_again(leases, source, news):
    source.faults = [NoRoom("full"), NoRoom("full")]
    leases.retain("d", "")
    news.until(lambda: leases.get("d") is not None)
    assert source.asked == 3
    assert not leases.has_errors


@pytest.mark.parametrize("fault", [ValueError("bad files"), ConnectionError("bad files")])
def test_a_refusal_is_told_once_and_the_next_request_asks_anew(leases, source, news, fault):
    source.faults = [fault]
    leases.retain("d", "")
    news.until(lambda: leases.has_errors)
    assert leases.take_errors() == [("d", "bad files")]
    assert leases.take_errors() == []
    leases.retain("d", "")
    news.until(lambda: leases.get("d") is not None)


def test_renewing_asks_for_everything_again(leases, source, news):
    leases.retain("a", "")
    leases.retain("b", "")
    news.until(lambda: leases.get("a") and leases.get("b"))
    leases.renew()
    news.until(lambda: leases.get("a") and leases.get("b") and source.asked == 4)


def test_dropped_while_it_was_asked_for(leases, source, news):
    source.gate.clear()
    leases.retain("d", "")
    leases.drop("d")
    source.gate.set()
    leases.retain("e", "")
    news.until(lambda: leases.get("e") is not None)
    news.until(lambda: set(source.leased) == {"e"})
    assert leases.digests == {"e"}


def test_without_prefetch_a_lease_is_asked_for_when_it_is_needed(source, news):
    leases = Leases(source, "me", news, prefetch=False)
    leases.retain("d", "folder")
    leases.retain("other", "folder")
    assert leases.get("d") is None
    news.until(lambda: leases.get("d") is not None)
    leases.drop("d")
    leases.drop("other")
    news.until(lambda: not source.leased)
    assert source.asked == 1
    leases.close()
