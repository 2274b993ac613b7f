"""Bodies: type, size, time, JSON and strictness."""

import contextlib
import gzip
import http.client
import socket

import pytest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import client_of

from serving.http.app import create_app
from serving.http.lanes import Lane
from serving.http.requests import body as body_module
from serving.http.settings import HttpSettings

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def small():
    settings = HttpSettings(max_body_bytes=1000)
    with client_of(create_app(FakeEngine(), settings)) as client:
        yield client


def good(client) -> None:
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


NOT_JSON = ["", "{", "[]", "3", "null", '"x"', "{'prompt': 'x'}", '{"prompt": "x"', "\xff"]
NOT_JSON += ["[" * 5000, '{"prompt": "\\ud800"}', '{"prompt": "x",}']
NOT_JSON += ['{"prompt": "x", "temperature": NaN}', '{"prompt": "x", "temperature": Infinity}']
NOT_JSON += ['{"prompt": "x", "seed": 1' + "0" * 5000 + "}"]


@pytest.mark.parametrize("body", NOT_JSON)
def test_what_is_not_a_json_object_is_400(client, body):
    answer = client.post("/v1/completions", content=body.encode("latin-1"), headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400
    good(client)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_wrong_content_type_is_400(client, content_type):
    headers = {"Content-Type": content_type} if content_type else {}
    answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert told.endswith("send the header Content-Type: application/json.")
    good(client)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_with_parameters_or_capitals_is_json(client, content_type):
    headers = {"Content-Type": content_type}
    answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 200


def test_a_declared_size_over_the_limit_is_413(small):
    answer = small.post("/v1/completions", json={"prompt": "x" * 1000})
    assert answer.status_code == 413
    assert "1000" in answer.json()["error"]["message"]
    good(small)


def test_a_client_that_sends_all_before_it_reads_gets_the_413(small):
    """As http.client and requests do: a connection that ends before is an error of theirs."""
    connection = http.client.HTTPConnection(small.base_url.host, small.base_url.port, timeout=60)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", b"x" * (16 << 20), headers)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Connection")) == (413, "close")
        assert b"The body is larger than" in answer.read()


def test_an_undeclared_size_over_the_limit_is_413(small):
    def chunks():
        for _ in range(20):
            yield b"x" * 100

    answer = small.post("/v1/completions", content=chunks(), headers=JSON)
    assert answer.status_code == 413
    good(small)


def test_a_body_that_does_not_come_is_408():
    settings = HttpSettings(body_timeout_s=0.3)
    with client_of(create_app(FakeEngine(), settings)) as client:
        url = client.base_url
        with socket.create_connection((url.host, url.port), timeout=60) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            assert b" 408 " in sock.recv(4096).split(b"\r\n")[0]
        assert client.get("/health").status_code == 200


def test_a_bad_content_length_is_400(small):
    url = small.base_url
    for value in (b"-1", b"1e3", b"99999999999999999999999"):
        with socket.create_connection((url.host, url.port), timeout=60) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\nContent-Length: " + value + b"\r\n\r\n"
            )
            assert sock.recv(4096).split(b" ")[1] in (b"400", b"413")
    good(small)


def test_an_encoded_body_is_415_and_not_called_bad_json(client):
    packed = gzip.compress(b'{"prompt": "x"}')
    for coding, body in (("gzip", packed), ("br", packed), ("gzip", b'{"prompt": "x"}')):
        headers = JSON | {"Content-Encoding": coding}
        answer = client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 415
        assert repr(coding) in answer.json()["error"]["message"]
    headers = JSON | {"Content-Encoding": "identity"}
    answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 200
    good(client)


def test_broken_json_is_told_with_its_place(client):
    answer = client.post("/v1/completions", content=b'{"prompt": "x",}', headers=JSON)
    assert "trailing comma at line 1 column 16" in answer.json()["error"]["message"]
    answer = client.post("/v1/completions", content=b'{"prompt": "\\ud83d"}', headers=JSON)
    assert "one alone is no text" in answer.json()["error"]["message"]


def test_large_bodies_are_read_beside_the_event_loop(client, monkeypatch: pytest.MonkeyPatch):
    lanes, run = [], body_module.run_in

    async def counted(lane, function, *args):
        lanes.append(lane)
        return await run(lane, function, *args)

    monkeypatch.setattr(body_module, "run_in", counted)
    monkeypatch.setattr(body_module, "_LARGE", 100)
    for prompt, more, status in (("x", 1, 200), ("x", 100, 200), (["x", 1.5], 100, 400)):
        answer = client.post("/v1/completions", json={"prompt": prompt, "other": "x" * more})
        assert answer.status_code == status
    assert lanes == [Lane.BODIES] * 2
