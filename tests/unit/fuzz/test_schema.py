"""Requests made from /openapi.json: no server error, and only the answers that it names."""

import collections
import logging

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from support.doubles.fake_engine import FakeEngine, write_fake_adapters

from serving.http.app import create_app
from serving.http.settings import HttpSettings

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
NAMES = ("fake-base", "law", "sql", "new")  # a model, adapters in the folder, and none
PLAIN = {"model", "prompt", "messages", "input", "stream", "seed", "tokens", "source"}
PLAIN |= {"lora_name", "lora_path", "load_inplace"}
GOOD = {
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/tokenize": {"prompt": "x"},
}
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


def make_app(folder):
    engine = FakeEngine(write_fake_adapters(folder / "adapters", "law", "sql"))
    return create_app(engine, HttpSettings(enable_runtime_lora=True))


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    app = make_app(tmp_path_factory.mktemp("schema"))
    logging.getLogger("serving").setLevel(logging.CRITICAL)
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    logging.getLogger("serving").setLevel(logging.NOTSET)


def name_something(case, name):
    """Let most of the requests be plain ones about something that there may be."""
    if name is None or not isinstance(case.body, dict):
        return
    case.body = {field: value for field, value in case.body.items() if field in PLAIN}
    for field in case.body.keys() & {"model", "lora_name", "lora_path"}:
        case.body[field] = name
    if "completions" in case.operation.path:
        case.body["max_tokens"] = 3
    if case.operation.path == "/v1/chat/completions" and name == "sql":
        case.body["messages"] = [{"role": "user", "content": "x"}]  # most drawn ones are too long
    if case.operation.path == "/v1/responses":
        case.body["max_output_tokens"] = 3
    if case.operation.path == "/v1/completions":
        case.body.setdefault("prompt", "x")


def fuzz(schema, mode, examples):
    """Return how often each operation gave each status."""
    seen = collections.Counter()
    for found in schema.get_all_operations():
        operation = found.ok()

        @seed(1)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode), st.sampled_from((None, *NAMES)))
        def send(case, name):
            name_something(case, name)
            answer = case.call()
            seen[case.operation.label, answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS)

        if mode is POSITIVE or operation.body:
            send()
    return seen


@pytest.mark.parametrize("examples", [5, pytest.param(25, marks=pytest.mark.long)])
def test_requests_that_fit_the_schema(schema, examples):
    seen = fuzz(schema, POSITIVE, examples)
    labels = {found.ok().label for found in schema.get_all_operations()}
    assert {label for label, _ in seen} == labels
    good = {label for label, status in seen if status == 200}
    assert good & {f"POST {path}" for path in GOOD}


@pytest.mark.parametrize("path", list(GOOD))
def test_a_plain_request_is_answered_as_described(schema, path):
    """Which requests are drawn depends on the modules that are loaded; these are always made."""
    case = schema[path]["POST"].Case(body={"model": "fake-base", **GOOD[path]})
    answer = case.call()
    assert answer.status_code == 200
    case.validate_response(answer, checks=CHECKS)


@pytest.mark.parametrize("examples", [5, pytest.param(25, marks=pytest.mark.long)])
def test_requests_that_do_not_fit_the_schema(schema, examples):
    seen = fuzz(schema, NEGATIVE, examples)
    assert sum(count for (_, status), count in seen.items() if status == 400) > 6 * examples


@pytest.mark.slow
@pytest.mark.parametrize("mode", [POSITIVE, NEGATIVE])
def test_many_requests(schema, mode):
    fuzz(schema, mode, 600)


def test_a_status_that_is_not_described_is_found(tmp_path):
    """The checks bite: the same requests fail against a description without 404."""
    app = make_app(tmp_path)
    for methods in app.openapi()["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("404", None)
    with pytest.raises(BaseException, match="Undocumented status code"):
        fuzz(schemathesis.openapi.from_asgi("/openapi.json", app), POSITIVE, 10)
