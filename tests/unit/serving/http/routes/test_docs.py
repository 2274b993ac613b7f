"""The page of routes: whole, plain, and off where it is not wanted."""

import re

import httpx
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import client_of

from serving.http.app import create_app
from serving.http.settings import HttpSettings


def test_it_names_every_route_and_field(client: httpx.Client):
    answer = client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for path in client.get("/openapi.json").json()["paths"]:
        assert f" {path}</h2>" in answer.text
    assert "<code>chat_template_kwargs</code></td><td>object" in answer.text
    assert "<code>stop</code></td><td>string or list of string" in answer.text
    assert "<code>messages</code></td><td>list of ChatMessage, required" in answer.text
    message = answer.text.partition("<h2>ChatMessage</h2>")[2].partition("<h2>")[0]
    assert "<code>role</code></td><td>" in message
    assert "GET /v1/models lists them" in answer.text


def test_it_loads_and_runs_nothing(client: httpx.Client):
    answer = client.get("/docs")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|src\s*=|https?://", answer.text)


def test_without_docs_there_is_no_description_either():
    with client_of(create_app(FakeEngine(), HttpSettings(docs=False))) as client:
        assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 404
