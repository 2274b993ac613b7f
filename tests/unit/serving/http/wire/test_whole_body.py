"""A body is whole, short enough and in time, or its request ends; a refused one is discarded."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from serving.http.errors import ApiError
from serving.http.wire import whole_body as module
from serving.http.wire.whole_body import whole_body


def read(parts, *headers, limit=10, timeout_s=5.0):
    """Read these parts; None stands for a client that leaves, a number for a wait.

    Returns the body or what was raised, and the parts that nobody asked for.
    """
    left = list(parts)

    async def receive():
        part = left.pop(0)
        if isinstance(part, float):
            await asyncio.sleep(part)
            part = b""
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    scope = {"type": "http", "headers": list(headers)}
    try:
        return asyncio.run(whole_body(scope, receive, limit, timeout_s)), left
    except (ApiError, ClientDisconnect) as error:
        return error, left


def length(value):
    return b"content-length", str(value).encode()


def assert_too_large(error):
    assert (error.status, error.headers) == (413, {"Connection": "close"})
    assert "larger than 10 bytes" in error.message


def test_parts_are_one_body():
    assert read([b"12345", b"", b"67890"], length(10)) == (b"1234567890", [])
    assert read([b""]) == (b"", [])


def test_a_body_of_too_large_a_length_is_discarded_before_the_answer():
    error, left = read([b"12345", b"678901"], length(11))
    assert_too_large(error)
    assert left == []


def test_a_body_without_a_length_is_discarded_where_it_is_too_long():
    error, left = read([b"12345", b"678901", b"2345"])
    assert_too_large(error)
    assert left == []


@pytest.mark.parametrize("declared", [10 + (64 << 20) + 1, "9" * 5000])
def test_a_length_beyond_what_is_discarded_is_refused_at_once(declared):
    error, left = read([b"1"], length(declared))
    assert_too_large(error)
    assert left == [b"1"]


def test_a_client_that_waits_for_the_answer_is_not_waited_for():
    error, left = read([b"1"], length(11), (b"expect", b"100-continue"))
    assert_too_large(error)
    assert left == [b"1"]


def test_a_body_without_an_end_is_discarded_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(module, "_MOST_DISCARDED", 25)
    error, left = read([b"1234567890"] * 9)
    assert_too_large(error)
    assert len(left) == 4  # the limit, what broke it, and two and a half more


def test_a_slow_body_is_discarded_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(module, "_DISCARD_S", 0.02)
    error, _ = read([b"1", 9.0, b"2"], length(11))
    assert_too_large(error)


def test_a_body_that_does_not_come():
    error, _ = read([b"1", 9.0], timeout_s=0.02)
    assert (error.status, error.headers) == (408, {"Connection": "close"})


@pytest.mark.parametrize("headers", [(), (length(11),)])
def test_a_client_that_leaves(headers):
    error, _ = read([b"1", None], *headers)
    assert isinstance(error, ClientDisconnect)
