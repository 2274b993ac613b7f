"""Streams: framing, keep-alive comments, errors after the 200, disconnects."""

import json
import re
import socket
import threading

import pytest
from support.processes.http_server import client_of
from support.waiting import wait_until

from serving.http.answers.answers import AbstractChoices
from serving.http.answers.streaming import EventStream, event
from serving.http.app import create_app
from serving.http.routes.completions import CompletionAnswer
from serving.http.settings import HttpSettings
from serving.http.wire.body_writer import CycleWriter

BODY = {"prompt": "hi", "max_tokens": 3, "stream": True}


@pytest.fixture(scope="module")
def client(engine):
    with client_of(create_app(engine, HttpSettings(keep_alive_s=0.1))) as client:
        yield client


def test_events_are_one_line_of_json():
    data = event({"text": 'a\n\n"\u2028é'})
    assert data.startswith(b"data: {")
    assert data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2
    assert json.loads(data[6:]) == {"text": 'a\n\n"\u2028é'}
    with pytest.raises(ValueError, match="not JSON compliant"):
        event({"x": float("nan")})


def test_silence_is_filled_with_comments(client, engine):
    engine.open.clear()
    with client.stream("POST", "/v1/completions", json=BODY) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        assert next(lines) == ""
        assert next(lines) == ": keep-alive"
        engine.open.set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("retryable", [False, True])
def test_an_error_after_the_200_is_an_event_and_then_done(client, engine, path, retryable):
    engine.fail = ("broke at /srv/x/y 0x7fffffff", retryable)
    body = BODY | {"messages": [{"role": "user", "content": "yo"}]}
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        blocks = "".join(answer.iter_text()).removesuffix("\n\n").split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    error = json.loads(blocks[-2].removeprefix("data: "))["error"]
    assert error["code"] == (503 if retryable else 500)
    assert error["message"] == "broke at y <address>"


@pytest.mark.parametrize("retryable", [False, True])
def test_an_error_before_any_answer_is_a_status(client, engine, retryable):
    engine.fail = ("broke", retryable)
    answer = client.post("/v1/completions", json=BODY | {"stream": False})
    assert answer.status_code == (503 if retryable else 500)
    assert answer.json()["error"]["message"] == "broke"
    assert client.post("/v1/completions", json=BODY | {"stream": False}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_request_itself_is_not_the_servers(client, engine, stream):
    engine.fail = ("bad_words: no token is left", False, True)
    answer = client.post("/v1/completions", json=BODY | {"stream": stream})
    said = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
    error = json.loads(said)["error"]
    assert answer.status_code == (200 if stream else 400)
    assert (error["code"], error["type"]) == (400, "BadRequestError")
    assert (error["param"], error["message"]) == ("bad_words", "bad_words: no token is left")


@pytest.mark.parametrize("stream", [False, True])
def test_a_value_error_of_what_makes_the_answer_is_not_the_requests(client, monkeypatch, stream):
    """It is like those of checks, but the request had passed them."""

    def broken(self, piece):
        raise ValueError("of ours, at /srv/x/y")

    monkeypatch.setattr(CompletionAnswer, "_choice", broken)
    answer = client.post("/v1/completions", json=BODY | {"stream": stream})
    said = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
    error = json.loads(said)["error"]
    assert answer.status_code == (200 if stream else 500)
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert "ours" not in answer.text


def test_a_client_that_goes_in_mid_stream_aborts_its_requests(client, engine):
    engine.open.clear()
    body = BODY | {"prompt": ["a", "b"], "n": 2}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        mine = [given.id for given in engine.submitted[-2:]]
        assert set(mine) <= engine.running
    wait_until(lambda: set(mine) <= set(engine.aborted))
    engine.open.set()
    assert client.post("/v1/completions", json=BODY | {"stream": False}).status_code == 200


def test_a_client_that_goes_before_a_whole_answer_aborts_too(client, engine):
    engine.open.clear()
    url, before = client.base_url, len(engine.submitted)
    body = json.dumps(BODY | {"stream": False}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port), timeout=60) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(engine.submitted) > before)
    mine = engine.submitted[-1].id
    wait_until(lambda: mine in engine.aborted)
    engine.open.set()


def test_a_finished_stream_aborts_nothing(client, engine):
    before = len(engine.aborted)
    assert client.post("/v1/completions", json=BODY).status_code == 200
    assert len(engine.aborted) == before


def events_of(client, path, body):
    """The events of a stream without what differs from one request to the next."""
    with client.stream("POST", path, json=BODY | body) as answer:
        assert answer.status_code == 200
        text = "".join(answer.iter_text())
    text = re.sub(r'"id":"[a-z]+-[0-9a-f]{32}","created":\d+', "", text)
    return text.split("\n\n")


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 6},
        {"n": 2, "echo": True},
        {"prompt": ["a", "b"], "stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"logprobs": 1, "return_token_ids": True},
        {"prompt_logprobs": 1},
        {"messages": [{"role": "user", "content": "yo"}]},
        {"messages": [{"role": "user", "content": "yo"}], "n": 2, "logprobs": True},
    ],
    ids=lambda body: " ".join(body),
)
def test_pieces_that_skip_the_layers_have_the_same_bytes(client, monkeypatch, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    quick = events_of(client, path, body)
    monkeypatch.setattr(CycleWriter, "is_ready", False)
    monkeypatch.setattr(AbstractChoices, "text_of_plain", lambda self, piece: None)
    slow = events_of(client, path, body)
    if body.get("n", 1) > 1 or isinstance(body.get("prompt"), list):  # in no order among them
        quick, slow = sorted(quick), sorted(slow)
    assert quick == slow


@pytest.fixture
def seen(client, engine, monkeypatch):
    """An answer ends only when this is set."""
    seen, deltas = threading.Event(), engine._deltas

    def slowly(given, index):
        for delta in deltas(given, index):
            if delta.finish_reason is not None:
                assert seen.wait(60)
            yield delta

    monkeypatch.setattr(engine, "_deltas", slowly)
    engine.open.clear()
    return seen


def data_of(line):
    return json.loads(line.removeprefix("data: "))


def test_a_stream_that_waits_is_written_without_its_task(client, engine, seen, monkeypatch):
    written, write = [], CycleWriter.write

    def noted(writer, data):
        written.append(data.decode())
        write(writer, data)

    monkeypatch.setattr(CycleWriter, "write", noted)
    texts = []
    with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 9}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"  # the stream waits
        engine.open.set()
        for line in lines:
            if line.startswith("data: {"):
                texts.append(data_of(line)["choices"][0]["text"])
            if len(texts) == 8:
                seen.set()
    whole = client.post("/v1/completions", json=BODY | {"max_tokens": 9, "stream": False})
    assert "".join(texts) == whole.json()["choices"][0]["text"]
    assert "".join(written).count("data: {") == 8  # all but the end


def test_an_event_that_cannot_be_made_ends_the_stream_with_an_error(
    client, engine, seen, monkeypatch
):
    def broken(self, batch):
        raise RuntimeError("at /srv/x")

    with client.stream("POST", "/v1/completions", json=BODY) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        monkeypatch.setattr(EventStream, "_encode", broken)
        engine.open.set()
        rest = [line for line in lines if line.startswith("data: ")]
    seen.set()
    assert data_of(rest[0])["error"]["message"] == "Internal server error."
    assert rest[1:] == ["data: [DONE]"]
