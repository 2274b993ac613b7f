"""Bad input over the real engine: its status, its name, and a next request that works."""

import itertools
import json
import socket

import httpx
import pytest
from support.cases.bad_adapters import BAD
from support.cases.engine_cases import planned_together, settle

from serving.http.requests.protocol import ChatBody, CompletionBody

PATHS = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def good(real_client):
    """Call it after every misdeed: base and adapter still give the text they gave at first."""

    def texts() -> list[str]:
        found = []
        for model in (None, "a"):
            body = {"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0}
            answer = real_client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["choices"][0]["text"])
        return found

    first = texts()

    def check() -> None:
        assert texts() == first

    return check


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    for word in words:
        assert word in error["message"], error
    assert "/tmp" not in answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("name", list(BAD))
def test_bad_adapters_are_refused_by_the_load_route_and_by_name(real_client, good, name):
    body = {"lora_name": "new", "lora_path": name}
    answer = real_client.post("/v1/load_lora_adapter", json=body)
    refused(answer, 400, BAD[name][1])
    assert "new" not in real_client.get("/v1/loras").json()["loras"]
    used = real_client.post("/v1/completions", json={"model": name, "prompt": "x"})
    refused(used, 400, BAD[name][1])
    assert name not in real_client.get("/v1/loras").json()["loras"]
    good()


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_reload_leaves_the_old_adapter_in_place(real_client, good, name):
    body = {"lora_name": "a", "lora_path": name, "load_inplace": True}
    refused(real_client.post("/v1/load_lora_adapter", json=body), 400, BAD[name][1])
    good()


OUTSIDE = [
    "../outside",
    "a/../../outside",
    "/etc",
    "escape",
    "file-escape",
    "a/../../adapters/a/..",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_out_of_the_root_are_refused(real_client, good, path):
    for route, body in (
        ("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": path}),
        ("/load_lora_adapter", {"lora_name": "new", "lora_path": path}),
        ("/v1/loras", {"lora_name": "new", "source": {"uri": path}}),
    ):
        answer = real_client.post(route, json=body)
        assert answer.status_code in (400, 404), answer.text
        assert "/tmp" not in answer.text
    assert "new" not in real_client.get("/v1/loras").json()["loras"]
    good()


@pytest.mark.parametrize(
    "model", ["nope", "../outside", "a/../a", "/etc", "escape", "a,b", "tiny:x"]
)
def test_unknown_adapters(real_client, good, model):
    answer = real_client.post("/v1/completions", json={"model": model, "prompt": "x"})
    if model == "escape":
        refused(answer, 400, "escape")
    else:
        refused(answer, 404, f"The model `{model}` does not exist.")
    good()


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_is_too_long(real_client, good, path):
    body = {"prompt": "x" * 500, "messages": [{"role": "user", "content": "x" * 500}]}
    answer = real_client.post(path, json=body)
    refused(answer, 400, "Input length (5", "maximum context length (128)")
    good()


def numeric_fields(kind) -> list[str]:
    return [
        field
        for field, info in kind.model_fields.items()
        if {"int", "float"} & set(str(info.annotation).replace("|", " ").split())
        or "int" in str(info.annotation)
        or "float" in str(info.annotation)
    ]


NUMBERS = ["-1", "-1e300", "1e300", "1e999", "-0.5", "2147483648", "9" * 400, "NaN", "-Infinity"]
OTHERS = ["null", '"1"', "true", "[]", "{}", "[null]", '{"1": 1e300}', '{"x": 0}', "[-1]", "0"]


@pytest.mark.parametrize("path", PATHS)
def test_every_numeric_field_with_every_nonsense(real_client, good, path):
    """Each answer is a 200 or a 400 that says which field; none is a 500, none takes long."""
    fields = numeric_fields(PATHS[path])
    assert {"n", "temperature", "seed", "logit_bias", "stop_token_ids", "max_tokens"} <= set(fields)
    start = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for field, value in itertools.product(fields, NUMBERS + OTHERS):
        text = json.dumps({k: v for k, v in start.items() if k != field})
        raw = f'{text[:-1]}, "{field}": {value}}}'
        answer = real_client.post(path, content=raw.encode(), headers=JSON)
        assert answer.status_code in (200, 400), (field, value, answer.text)
        if answer.status_code == 400 and "JSON" not in answer.text:
            message = answer.json()["error"]["message"]
            assert field in message or answer.json()["error"]["param"] == field, (field, value)
    good()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", -1),
        ("n", 10**9),
        ("max_tokens", -1),
        ("max_tokens", 10**9),
        ("max_completion_tokens", 10**30),
        ("min_tokens", 10**9),
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("presence_penalty", 1e9),
        ("frequency_penalty", -1e9),
        ("seed", 2**63),
        ("logprobs", 10**6),
        ("prompt_logprobs", -1),
        ("stop_token_ids", [260]),
        ("stop_token_ids", list(range(65))),
        ("logit_bias", {"260": 1.0}),
        ("priority", 2**40),
    ],
)
def test_numbers_out_of_bounds_are_named(real_client, good, field, value):
    answer = real_client.post("/v1/completions", json={"prompt": "x", field: value})
    refused(answer, 400, field)
    good()


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": }', b"[" * 100_000])
def test_invalid_json(real_client, good, raw):
    refused(real_client.post("/v1/completions", content=raw, headers=JSON), 400)
    good()


def test_wrong_content_type(real_client, good):
    for headers in ({}, {"Content-Type": "text/plain"}):
        answer = real_client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        refused(answer, 400, "application/json")
    good()


def test_a_client_that_goes_in_mid_stream(real_client, real_engine, good):
    body = {"prompt": "x", "max_tokens": 120, "ignore_eos": True, "stream": True, "n": 4}
    with real_client.stream("POST", "/v1/completions", json=body | {"model": "b"}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
    settle(real_engine)
    good()


def test_a_client_that_goes_before_it_has_sent_everything(real_client, real_engine, good):
    url = real_client.base_url
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port), timeout=5) as sock:
        sock.sendall(head + b'Content-Length: 1000\r\n\r\n{"prompt": "x"')
    settle(real_engine)
    good()


def test_a_full_queue_is_429_with_retry_after(real_client, real_engine, good):
    body = {"prompt": ["x"] * 17, "n": 1, "max_tokens": 100, "ignore_eos": True}
    with planned_together(real_engine, 35):  # one more than come: none leaves the queue
        answer = real_client.post("/v1/completions", json=body | {"n": 2})
    refused(answer, 429, "queue")
    assert int(answer.headers["retry-after"]) >= 1
    settle(real_engine)
    good()
