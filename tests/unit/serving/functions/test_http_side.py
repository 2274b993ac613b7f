"""Routes of a function over a connection that it was given."""

import dataclasses
import socket
import threading

from support.doubles.fake_engine import FakeEngine

from serving.functions.callers import token_of
from serving.functions.http_side import HttpSide
from serving.functions.messages import http_fields, http_of
from serving.http.access.keys import Caller
from serving.http.settings import HttpSettings


def ask(side: HttpSide, method: str, path: str, token: str) -> tuple[bytes, bool]:
    """Return the answer to one request, and whether the end of its connection was told."""
    ours, theirs = socket.socketpair()
    closed = threading.Event()
    side.adopt(theirs.detach(), closed.set)
    key = f"Authorization: Bearer {token}\r\n" if token else ""
    with ours:
        ours.settimeout(60)
        ours.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: f\r\nConnection: close\r\n{key}\r\n".encode()
        )
        answer = b"".join(iter(lambda: ours.recv(4096), b""))
    return answer, closed.wait(60)


def test_a_rehearsal_asks_the_routes_of_text_and_is_not_counted():
    engine = FakeEngine()
    settings = http_of(http_fields(HttpSettings(served_names=("base",))))
    side = HttpSide(engine, settings)
    before = lines_of(side)
    assert side.rehearse(None, "a") == 2
    assert [request.adapter for request in engine.submitted] == [None, None]
    assert lines_of(side) == before
    assert side.rehearse("nobody", "a") == 0  # status 404
    side = HttpSide(engine, dataclasses.replace(settings, log_requests=True))
    assert side.rehearse(None, "a") == 0
    assert len(engine.submitted) == 2


def lines_of(side: HttpSide) -> list[str]:
    """Return the lines of the routes' metrics that count requests."""
    return [line for line in side.metrics_text().splitlines() if line.startswith("http_")]


def test_a_function_answers_callers_of_its_front_only():
    settings = http_of(http_fields(HttpSettings(served_names=("base",), api_keys=("secret",))))
    assert not settings.has_api_keys
    side = HttpSide(FakeEngine(), settings)
    answer, told = ask(side, "GET", "/v1/models", token_of(Caller(id="a")))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"id":"base"' in answer
    assert told
    for token in ("", "secret"):
        answer, told = ask(side, "GET", "/v1/models", token)
        assert answer.startswith(b"HTTP/1.1 401")
        assert told
    assert 'http_requests_total{handler="/v1/models"' in side.metrics_text()
