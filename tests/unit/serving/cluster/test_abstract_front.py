"""Every front: bounds of bodies, own answers, and the rest to one engine."""

import contextlib
import http.client

import httpx
import pytest
from starlette.responses import PlainTextResponse
from support.processes.http_server import serve_app

from serving.cluster.abstract_front import AbstractFront, BodyLimits
from serving.http.errors import ApiError


class Front(AbstractFront):
    """Answers /own itself, refuses /refused, and says what it would pass on."""

    def _health(self, path):
        return PlainTextResponse(f"probe {path}")

    async def _answer_here(self, scope, body, receive, send_):
        if scope["path"] == "/refused":
            raise ApiError(409, "not now")
        if scope["path"] == "/own":
            await PlainTextResponse("own")(scope, receive, send_)
        return scope["path"] == "/own"

    async def _to_one(self, scope, body, receive, send_):
        await PlainTextResponse(f"passed {body.decode()}")(scope, receive, send_)


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/health", "", 200, "probe /health"),
        ("/ping", "", 200, "probe /ping"),
        ("/ping", "x", 200, "probe /ping"),  # SageMaker's is a POST
        ("/own", "", 200, "own"),
        ("/refused", "", 409, "not now"),
        ("/v1/completions", "abc", 200, "passed abc"),
        ("/v1/completions", "abcde", 413, "larger than 4 bytes"),
    ],
)
def test_answers(path, body, status, text):
    with serve_app(Front(BodyLimits(4))) as url:
        answer = httpx.request("POST" if body else "GET", url + path, content=body, timeout=60)
    assert answer.status_code == status
    assert text in answer.text


def test_a_client_that_sends_all_before_it_reads_gets_the_413():
    """As http.client and requests do: a connection that ends before is an error of theirs."""
    with serve_app(Front(BodyLimits(4))) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", b"x" * (16 << 20))
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("Connection")) == (413, "close")
            assert b"larger than 4 bytes" in answer.read()
