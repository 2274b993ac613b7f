"""Calls over a pipe: values, errors by their kinds, and an end on either side."""

import multiprocessing
import multiprocessing.connection
import threading
import time

import pytest

from serving.lora_server.calls import (
    Caller,
    RemoteLeases,
    RemoteRank,
    answer_calls,
    serve_leases,
)
from serving.lora_server.coordinator import Lease, NoRoom
from serving.lora_server.lease_metrics import PartLoad


def answering(connection, **functions):
    thread = threading.Thread(target=answer_calls, args=(connection, functions), daemon=True)
    thread.start()
    return thread


def raising(error):
    def function(*_):
        raise error

    return function


def test_values_come_back_and_the_end_of_one_side_is_the_end_of_the_other(pipe):
    thread = answering(pipe[1], double=lambda x: [2 * x, "ä"])
    caller = Caller(pipe[0])
    assert caller.call("double", 4) == [8, "ä"]
    caller.close()
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(ConnectionError):
        caller.call("double", 4)


class ClosedMeanwhile:
    """A connection whose caller is closed when a call is about to wait, before others are made."""

    def __init__(self, connection):
        self._connection, self.fileno = connection, connection.fileno
        self.send_bytes, self.recv_bytes = connection.send_bytes, connection.recv_bytes
        self.others = []

    @property
    def closed(self):
        return self._connection.closed

    def close(self):
        self._connection.close()

    def poll(self, limit):
        descriptor = self.fileno()
        self.closer = threading.Thread(target=self.caller.close, daemon=True)
        self.closer.start()
        while not (self.closed or self._connection.poll(0)):
            time.sleep(0.001)
        self.others = multiprocessing.Pipe()
        return bool(multiprocessing.connection.wait([descriptor], limit))


def test_a_call_under_way_ends_with_its_side_and_waits_for_no_other(pipe):
    """A descriptor that is closed under it would be the next connection's, where nothing comes."""
    connection = ClosedMeanwhile(pipe[0])
    connection.caller = Caller(connection, limit_s=1.0)
    with pytest.raises(ConnectionError) as caught:
        connection.caller.call("load")
    assert "no answer" not in str(caught.value)
    connection.closer.join(30)
    assert connection.closed
    connection.caller.close()  # once more changes nothing
    for other in connection.others:
        other.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), ValueError),
        (FileNotFoundError("no"), RuntimeError),
        (NoRoom("no"), NoRoom),
        (ConnectionResetError("no"), ConnectionError),
        (KeyError("no"), RuntimeError),
    ],
)
def test_errors_keep_their_kind(pipe, error, kind):
    answering(pipe[1], fail=raising(error), fine=lambda: 1)
    caller = Caller(pipe[0])
    with pytest.raises(kind, match="no"):
        caller.call("fail")
    assert caller.call("fine") == 1


def test_only_what_is_offered_can_be_called(pipe):
    answering(pipe[1], fine=lambda: 1)
    with pytest.raises(ValueError, match="no call 'system'"):
        Caller(pipe[0]).call("system", "ls")


def test_a_side_that_does_not_answer_is_given_up(pipe):
    caller = Caller(pipe[0], limit_s=0.05)
    with pytest.raises(ConnectionError, match="no answer to hello within"):
        caller.call("hello")
    with pytest.raises(ConnectionError):  # a late answer would be taken for another call's
        caller.call("hello")


def test_bytes_that_are_no_answer_are_the_end(pipe):
    pipe[1].send_bytes(b"\x80\x04not json")
    with pytest.raises(ConnectionError):
        Caller(pipe[0]).call("hello")


def test_a_rank_far_away(pipe):
    told = []

    def load(*of_load):
        told.append(of_load)
        return PartLoad(0.25, 0.5)

    class Parallel:
        limit_s = 1.0

        def call(self, *what):
            told.append(what)
            return [0.5, 1.0]

    answering(pipe[1], load=load, unload=lambda *a: told.append(a))
    rank = RemoteRank(Caller(pipe[0]), Parallel())
    assert rank.fetch("folder", "digest") == PartLoad(0.5, 1.0)
    assert rank.load(3, "folder", "digest", 1) == PartLoad(0.25, 0.5)
    rank.forget("digest")
    rank.unload(3, 2)
    fetched = ("fetch", "folder", "digest")
    assert told == [fetched, (3, "folder", "digest", 1), ("forget", "digest"), (3, 2)]


def test_files_that_are_not_read_in_time_are_an_error_of_this_adapter(pipe):
    class Hanging:
        limit_s = 5.0

        def call(self, *_):
            raise TimeoutError("no answer")

    rank = RemoteRank(Caller(pipe[0]), Hanging())
    with pytest.raises(ValueError, match="has not read the adapter's files in 5 s: look at the di"):
        rank.fetch("folder", "digest")
    with pytest.raises(ConnectionError, match="does not answer"):
        rank.forget("digest")


class Source:
    def __init__(self):
        self.told, self.left = [], threading.Event()

    def request(self, instance, digest, folder):
        if digest == "none":
            raise NoRoom("full")
        return None if digest == "later" else Lease(7, 9)

    def release(self, instance, digest):
        self.told.append((instance, digest))

    def leave(self, instance):
        self.told.append(instance)
        self.left.set()


def test_leases_far_away_end_with_the_connection(pipe):
    source = Source()
    thread = serve_leases(source, "me", pipe[1])
    caller = Caller(pipe[0])
    leases = RemoteLeases(caller)
    assert leases.lease("me", "d", "f") == Lease(7, 9)
    with pytest.raises(NoRoom, match="full"):
        leases.lease("me", "none", "f")
    with pytest.raises(NoRoom, match="on its way"):
        leases.lease("me", "later", "f")
    leases.release("me", "d")
    assert source.told == [("me", "d")]
    caller.close()
    assert source.left.wait(30)
    thread.join(30)
    assert source.told == [("me", "d"), "me"]


def test_leaving_is_a_call_too(pipe):
    source = Source()
    serve_leases(source, "me", pipe[1])
    RemoteLeases(Caller(pipe[0])).leave("me")
    assert source.told == ["me"]
