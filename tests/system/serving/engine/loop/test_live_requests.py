"""Live requests release all that they hold at their end, however their callers behave."""

import threading
from types import SimpleNamespace

import pytest

from serving.api.request import FinishReason
from serving.engine.loop.live_requests import LiveRequests


class Live:
    """A request of one choice; `trouble` is raised where its caller is told something."""

    def __init__(self, name, trouble=None):
        self.request = SimpleNamespace(request_id=name, adapter_digest=f"digest of {name}")
        self.sequence = SimpleNamespace(request=self.request)
        self.trouble, self.told, self.stops, self.done = trouble, [], False, False

    def deliver(self, progress, now, ending):
        if self.trouble is not None:
            raise self.trouble
        self.done = self.stops
        if self.done:
            ending(self, self.sequence, True)
        self.on_told()

    def end(self, sequence, reason, error, *, retryable, bad_request=False, of_server=False):
        self.told.append((reason, error, retryable))
        self.done = True
        self.on_told()
        if self.trouble is not None:
            raise self.trouble

    def on_told(self):
        """The caller is told something."""

    def unfinished(self):
        return [] if self.done else [self.sequence]

    def summary(self, now):
        name = self.request.request_id
        return SimpleNamespace(adapter=name, outcome=lambda: f"outcome of {name}")


class Books:
    """What the engine keeps for requests, as a list of what is done with it."""

    def __init__(self):
        self.done = []
        self.scheduler = SimpleNamespace(
            finish=lambda sequence, reason: self.done.append(reason),
            abort=lambda name: self.done.append(f"abort {name}"),
        )
        self.residencies = SimpleNamespace(drop=self.done.append)
        self.metrics = SimpleNamespace(
            request_done=lambda summary: None, later=lambda count, *values: count(*values)
        )
        self.live = LiveRequests(
            threading.Lock(), self.scheduler, self.residencies, self.metrics, self.finished
        )

    def finished(self, adapter, outcome, digest):
        self.done.append(outcome)

    def add(self, *args):
        live = Live(*args)
        self.live.add(live)
        return live


@pytest.fixture
def books():
    return Books()


def progress(live):
    return SimpleNamespace(sequence=live.sequence)


def test_a_stop_string_ends_the_request_for_the_scheduler_too(books):
    live = books.add("a")
    books.live.deliver(progress(live), 0.0)
    assert "a" in books.live
    live.stops = True
    books.live.deliver(progress(live), 0.0)
    assert books.done == [FinishReason.STOP, "digest of a", "outcome of a"]
    books.live.check_integrity()


@pytest.mark.parametrize("way", ["deliver", "end"])
def test_who_has_the_end_may_ask_again_at_once(books, way):
    """Before: the id was still in use, and so was the adapter's memory."""
    live, again = books.add("a"), []

    def ask_again():
        again.append(("a" in books.live, list(books.done)))
        books.add("a")

    live.stops, live.on_told = True, ask_again
    if way == "deliver":
        books.live.deliver(progress(live), 0.0)
    else:
        books.live.end(live.sequence, FinishReason.ABORT)
    reason = [FinishReason.STOP] if way == "deliver" else []
    assert again == [(False, [*reason, "digest of a"])]
    assert books.done == [*reason, "digest of a", "outcome of a"]
    assert "a" in books.live  # the new one


@pytest.mark.parametrize("way", ["deliver", "end"])
def test_what_comes_late_for_an_ended_request_is_not_told_to_the_next_one_of_its_id(books, way):
    """A stop string is found when the next step runs, and its caller may ask again meanwhile."""
    live = books.add("a")
    live.stops = True
    books.live.deliver(progress(live), 0.0)
    again, told = books.add("a"), []
    again.on_told = lambda: told.append(again)
    if way == "deliver":
        books.live.deliver(progress(live), 0.0)
    else:
        books.live.end(live.sequence, FinishReason.ABORT)
    assert not told
    assert "a" in books.live


@pytest.mark.parametrize("way", ["deliver", "end"])
def test_a_caller_that_raises_loses_its_own_request_only(books, way, caplog):
    broken, good = books.add("broken", ValueError("no")), books.add("good")
    if way == "deliver":
        books.live.deliver(progress(broken), 0.0)
    else:
        books.live.end(broken.sequence, FinishReason.ABORT)
    left = ["abort broken"] if way == "deliver" else []
    assert books.done == [*left, "digest of broken", "outcome of broken"]
    assert "broken" not in books.live
    assert "good" in books.live
    assert not good.told
    assert "Request broken failed." in caplog.text


def test_closing_tells_all_and_what_comes_later_is_ignored(books, caplog):
    broken, good = books.add("broken", ValueError("no")), books.add("good")
    books.live.close("stopped")
    assert broken.told == good.told == [(FinishReason.ERROR, "stopped", True)]
    assert "The caller of request broken could not be notified." in caplog.text
    books.live.deliver(progress(good), 0.0)
    books.live.end(good.sequence, FinishReason.ABORT)
    assert len(good.told) == 1
    books.live.check_integrity()


def test_a_live_request_is_named(books):
    books.add("a")
    with pytest.raises(AssertionError, match="'a'"):
        books.live.check_integrity()
