"""A port that is for the front answers nobody else."""

import asyncio

import pytest

from serving.http.access.front_only import FrontOnly


def ask(*headers):
    sent = []

    async def inner(scope, receive, send):
        sent.append("answered")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "headers": [(b"proxy-authorization", h) for h in headers]}
    asyncio.run(FrontOnly(inner, "s3")(scope, None, send))
    return sent


def test_the_front_is_answered():
    assert ask(b"Bearer s3") == ["answered"]


@pytest.mark.parametrize("headers", [(), (b"Bearer s4",), (b"s3",), (b"Bearer s3", b"Bearer s3")])
def test_others_are_not(headers):
    start, body = ask(*headers)
    assert start["status"] == 407
    assert b"for the front of the cluster" in body["body"]
