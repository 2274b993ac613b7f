"""An answer with a length is whole or not begun; a stream may end with an error event."""

import asyncio
import json

import pytest
from starlette.requests import ClientDisconnect

from serving.cluster.relay import relay, while_there
from serving.cluster.upstream import UpstreamBroken

LENGTH, EVENTS = (b"content-length", b"3"), (b"content-type", b"text/event-stream")


class Upstream:
    """An answer of these parts; an exception among them is raised."""

    status = 200

    def __init__(self, parts, *headers):
        self.parts, self.headers, self.closed = parts, headers, False

    async def body(self):
        for part in self.parts:
            await asyncio.sleep(0)
            if isinstance(part, Exception):
                raise part
            yield part

    async def whole(self):
        return b"".join([part async for part in self.body()])

    async def close(self):
        self.closed = True


async def stays():
    await asyncio.Event().wait()


async def leaves():
    return {"type": "http.disconnect"}


def relayed(upstream, receive=stays):
    """Return the messages that the client got, and what was raised."""
    sent, raised = [], None

    async def send(message):
        sent.append(message)

    try:
        asyncio.run(relay(upstream, receive, send))
    except Exception as error:
        raised = error
    assert upstream.closed
    return sent, raised


def test_an_answer_with_a_length_goes_out_whole():
    sent, raised = relayed(Upstream([b"a", b"bc"], LENGTH, (b"x-a", b"b")))
    assert raised is None
    assert sent[0]["headers"] == [(b"x-a", b"b"), LENGTH]
    assert sent[1] == {"type": "http.response.body", "body": b"abc"}


def test_nothing_of_it_goes_out_when_it_is_cut_off():
    sent, raised = relayed(Upstream([b"a", UpstreamBroken("gone")], LENGTH))
    assert sent == []
    assert isinstance(raised, UpstreamBroken)


def test_a_stream_goes_out_as_it_comes():
    sent, raised = relayed(Upstream([b"a", b"bc"], EVENTS))
    assert raised is None
    assert [message.get("body") for message in sent] == [None, b"a", b"bc", b""]


def test_a_stream_that_is_cut_off_says_so():
    sent, raised = relayed(Upstream([b"a", UpstreamBroken("gone")], EVENTS))
    assert isinstance(raised, ConnectionAbortedError)
    assert json.loads(sent[-1]["body"].removeprefix(b"data: "))["error"]["code"] == 503
    assert not sent[-1].get("more_body", False)


def test_another_answer_that_is_cut_off_stays_open_ended():
    sent, raised = relayed(Upstream([b"a", UpstreamBroken("gone")]))
    assert isinstance(raised, ConnectionAbortedError)
    assert sent[-1]["more_body"]


def test_a_client_that_leaves_ends_the_answer():
    sent, raised = relayed(Upstream([b"a"] * 100, LENGTH), leaves)
    assert sent == []
    assert isinstance(raised, ClientDisconnect)


def test_work_ends_before_the_client_is_given_up():
    ended = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(ClientDisconnect):
        asyncio.run(while_there(work(), leaves))
    assert ended == [True]
