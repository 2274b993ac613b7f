"""A body at the router is whole, short enough and in time, or its request ends."""

import asyncio

import pytest

from serving.cluster.inbound import ClientLeft, read_body
from serving.http.errors import ApiError


def read(parts, length=None, limit=10, timeout_s=5.0):
    """Read these parts; None stands for a client that leaves, a number for a wait."""
    left = list(parts)

    async def receive():
        part = left.pop(0)
        if isinstance(part, float):
            await asyncio.sleep(part)
            part = b""
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    headers = [] if length is None else [(b"content-length", length)]
    scope = {"type": "http", "headers": headers}
    return asyncio.run(read_body(scope, receive, limit, timeout_s)), left


def test_parts_are_one_body():
    assert read([b"12345", b"", b"67890"], b"10") == (b"1234567890", [])
    assert read([b""]) == (b"", [])


@pytest.mark.parametrize("length", [b"11", b"9" * 5000])
def test_a_declared_length_is_refused_before_a_byte_is_asked_for(length):
    with pytest.raises(ApiError) as error:
        read([], length)
    assert error.value.status == 413


def test_a_body_without_a_length_is_refused_where_it_is_too_long():
    with pytest.raises(ApiError) as error:
        read([b"12345", b"678901", b"never asked for"])
    assert (error.value.status, error.value.headers) == (413, {"Connection": "close"})


def test_a_body_that_does_not_come():
    with pytest.raises(ApiError) as error:
        read([b"1", 9.0], timeout_s=0.02)
    assert error.value.status == 408


def test_a_client_that_leaves():
    with pytest.raises(ClientLeft):
        read([b"1", None])
