"""Paths without a route say what there is in place of them."""

import asyncio
import re

import pytest
from fastapi import FastAPI

from serving.http.routes.absent import _INSTEAD, Absent


@pytest.mark.parametrize(
    ("method", "path", "text"),
    [
        ("POST", "/v1/embeddings", "POST /classify"),
        ("POST", "/invocations", "POST /v1/chat/completions"),
        ("POST", "/generate", "ADAPTER.* to POST /v1/completions"),
        ("POST", "/generate_stream", '"stream": true'),
        ("POST", "/", "POST /v1/completions"),
        ("GET", "/health_generate", "GET /health "),
        ("GET", "/get_model_info", "GET /v1/models"),
        ("POST", "/load_lora_adapter_from_tensors", "below --lora-dir"),
        ("GET", "/is_sleeping", "stop the process"),
        ("GET", "/v1/responses/resp_1", "no response is kept"),
        ("POST", "/v1/chat/completion", "the nearest is /v1/chat/completions"),
        ("GET", "/health/", "the nearest is /health"),
        ("GET", "/a/b/c", "route; GET /openapi.json lists"),
    ],
)
def test_a_path_without_a_route(client, method, path, text):
    answer = client.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (404, "NotFoundError")
    assert error["message"].startswith("Not Found: there is no such route; ")
    assert re.search(text, error["message"])


def test_no_route_of_ours_is_called_absent(client):
    ours = set(client.get("/openapi.json").json()["paths"])
    assert not ours & _INSTEAD.keys()


def test_a_websocket_is_closed():
    sent = []

    async def send(message):
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/v1/realtime"}
    asyncio.run(Absent(FastAPI())(scope, None, send))
    assert sent == ["websocket.close"]
