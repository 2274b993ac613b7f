"""Pieces go out at once where that needs no waiting, and as h11 writes them."""

import weakref
from types import SimpleNamespace

import h11
import pytest

from serving.http.wire.body_writer import body_writer, offer
from serving.http.wire.quick_connection import QuickConnection


class Cycle:
    """What a writer looks at of uvicorn's cycle, in the midst of an answer."""

    def __init__(self, headers=(), method="POST"):
        self.conn, self.sent = QuickConnection(h11.SERVER), []
        self.conn.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n")
        self.conn.next_event()
        self.conn.send(h11.Response(status_code=200, headers=list(headers)))
        self.transport = SimpleNamespace(write=self.sent.append)
        self.flow = SimpleNamespace(write_paused=False)
        self.scope = {"method": method}
        self.response_started, self.response_complete, self.disconnected = True, False, False


def writer_of(cycle):
    offer(cycle)
    return body_writer(cycle.scope)


def test_a_piece_is_what_h11_writes():
    cycle = Cycle()
    writer = writer_of(cycle)
    assert writer.is_ready
    writer.write(b"ab" * 20)
    assert cycle.sent == [cycle.conn.send(h11.Data(data=b"ab" * 20))]


@pytest.mark.parametrize(
    "change",
    [
        lambda cycle: setattr(cycle.flow, "write_paused", True),
        lambda cycle: setattr(cycle, "disconnected", True),
        lambda cycle: setattr(cycle, "response_complete", True),
        lambda cycle: setattr(cycle, "response_started", False),
        lambda cycle: cycle.conn.send(h11.EndOfMessage()),
    ],
    ids=["the client is slow", "it has gone", "complete", "not begun", "ended"],
)
def test_nothing_is_written_that_would_have_to_wait_or_is_late(change):
    cycle = Cycle()
    writer = writer_of(cycle)
    change(cycle)
    assert not writer.is_ready


def test_an_answer_with_a_length_takes_the_long_way():
    cycle = Cycle([(b"content-length", b"3")])
    assert not writer_of(cycle).is_ready


def test_a_cycle_that_has_gone_is_not_kept():
    cycle = Cycle()
    writer, gone = writer_of(cycle), weakref.ref(cycle)
    assert writer.is_ready
    del cycle
    assert gone() is None
    assert not writer.is_ready


def test_others_have_no_writer():
    assert body_writer({"type": "http"}) is None
    assert writer_of(Cycle(method="HEAD")) is None
