"""/openapi.json names every body, every error, and no status that is never sent."""

import pytest
from support.doubles.fake_engine import FakeEngine

from serving.http.app import create_app
from serving.http.requests.protocol import BODIES
from serving.http.routes.description import describe


@pytest.fixture(scope="module")
def schema():
    return describe(create_app(FakeEngine()))


def operations(schema):
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_body_is_described(schema):
    assert {kind.__name__ for kind in BODIES} <= schema["components"]["schemas"].keys()


def test_an_operation_with_a_body_names_the_errors_of_a_body(schema):
    for name, operation in operations(schema):
        if "requestBody" in operation:
            assert {"400", "404", "408", "413", "429"} <= operation["responses"].keys(), name


def test_what_is_never_sent_is_not_described(schema):
    for name, operation in operations(schema):
        assert "422" not in operation["responses"], name


def test_answers_that_are_no_json_say_so(schema):
    content = {
        name: set(operation["responses"]["200"].get("content", {}))
        for name, operation in operations(schema)
    }
    assert content["GET /metrics"] == {"text/plain"}
    assert content["POST /v1/load_lora_adapter"] == {"text/plain"}
    assert content["GET /health"] == set()
    assert content["POST /v1/completions"] == {"application/json", "text/event-stream"}


def test_the_description_is_made_once():
    app = create_app(FakeEngine())
    assert app.openapi() is app.openapi()
