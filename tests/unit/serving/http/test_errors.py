"""Exceptions become statuses, and their messages lose directories and addresses."""

import json

import pytest
from pydantic import ValidationError
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import client_of

from lora_jax.adapters.registry import AdapterNotFound
from serving.api.request import EngineDead, QueueFull
from serving.http.app import create_app
from serving.http.errors import ApiError, after_checks, from_exception, from_validation, scrub
from serving.http.requests.protocol import ChatBody, CompletionBody


@pytest.mark.parametrize(
    ("message", "scrubbed"),
    [
        ("cannot read /srv/models/x/adapter_model.safetensors: bad", "adapter_model.safetensors"),
        ("see '/home/me/.ssh/id'", "see 'id'"),
        ("at 0x7f00deadbeef", "at <address>"),
        ("open ~/secret/key failed", "open key failed"),
        ("file:///srv/data/a.txt", "a.txt"),
        ("no /etc here", "no <path> here"),
        ("object <Foo at 0x7ffff7>", "object <Foo at <address>>"),
    ],
)
def test_scrub_takes_places_away(message, scrubbed):
    assert scrubbed in scrub(message)
    for secret in ("/srv", "/home", "/etc", "~/", "0x7f"):
        assert secret not in scrub(message)


@pytest.mark.parametrize(
    "message",
    [
        "The model `org/name` does not exist.",
        "temperature must be in [0, 100], got -1.",
        "adapters/sql: lora_B is missing for model.layers.0.mlp",
        "max 512 tokens/s",
        "text/event-stream and 1/2",
        "base_model.model.layers.0/q_proj",
    ],
)
def test_scrub_leaves_names_alone(message):
    assert scrub(message) == message


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("bad"), 400),
        (AdapterNotFound("x", ()), 404),
        (NotImplementedError("later"), 501),
        (QueueFull("Full.", 1.5), 429),
        (EngineDead("The engine has stopped."), 503),
        (ApiError(418, "tea"), 418),
        (KeyError("secret"), 500),
        (MemoryError("0x7fffffff"), 500),
    ],
)
def test_status_map(error, status):
    answer = from_exception(error)
    assert answer.status == status
    assert answer.body()["error"]["code"] == status
    if status == 429:
        assert answer.headers == {"Retry-After": "2"}
    if status == 500:
        assert answer.message == "Internal server error."


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("of ours"), 500), (ApiError(400, "bad_words"), 400), (EngineDead("it"), 503)],
)
def test_a_fault_after_the_checks_is_the_server_s(error, status, caplog):
    with pytest.raises(ApiError) as caught, after_checks():
        raise error
    assert caught.value.status == status
    assert ("of ours" in caplog.text) is (status == 500)
    with pytest.raises(OSError, match="gone"), after_checks(OSError):
        raise OSError("gone")


def test_messages_do_not_grow_with_the_request():
    assert len(ApiError(400, "x" * 10**6).message) <= 2000


def test_unexpected_errors_are_500_without_details(caplog):
    engine = FakeEngine()

    def broken(*args, **kwargs):
        raise RuntimeError("secret at /home/me/x")

    engine.submit = broken
    with client_of(create_app(engine)) as client:
        answer = client.post("/v1/completions", json={"prompt": "hi"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"]
        assert "Unexpected error" in caplog.text
        assert client.get("/health").status_code == 200


def test_unknown_routes_and_methods_have_the_same_body(client):
    for method, path, status, kind in (
        ("GET", "/nope", 404, "NotFoundError"),
        ("PUT", "/v1/models", 405, "MethodNotAllowedError"),
    ):
        answer = client.request(method, path)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (status, kind)


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/v1/completions", "POST"), ("/v1/loras", "GET, POST"), ("/v1/loras/a", "DELETE")],
)
def test_a_wrong_method_is_told_those_of_the_path(client, path, methods):
    answer = client.request("PATCH", path)
    assert answer.json()["error"]["message"].endswith(f": this path takes {methods}.")
    assert answer.headers["allow"] == methods


def test_a_field_that_the_engine_checks_is_named():
    error = from_exception(ValueError("stop_token_ids token id must be in [0, 9], got 10."))
    assert (error.status, error.param) == (400, "stop_token_ids")
    assert from_exception(ValueError("logprobsy")).param is None


@pytest.mark.parametrize(
    ("model", "body", "said"),
    [
        (ChatBody, {"messages": [{}]}, "messages.0.role: Field required"),
        (ChatBody, {"messages": [{"role": 5}]}, "messages.0.role: Input should be a valid string"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: Input should be a valid string / Input should be a valid array",
        ),
        (
            CompletionBody,
            {"stream_options": {"include_usage": "x"}},
            "stream_options.include_usage: Input should be a valid boolean",
        ),
        (CompletionBody, {"stop_token_ids": ["x"]}, "stop_token_ids.0: Input should be a valid in"),
        (CompletionBody, {"logit_bias": {"a": "x"}}, "logit_bias: Input should be a valid number"),
        (CompletionBody, {"stop": 5}, "stop: Input should be a valid string / Input should be a v"),
    ],
)
def test_a_wrong_field_has_its_whole_path(model, body, said):
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(body))
    error = from_validation(caught.value)
    assert error.message.startswith(said)
    assert error.param == next(iter(body))
