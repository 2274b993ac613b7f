"""Tools of a chat: a demanded call is a schema, the template sees the tools, mistakes are named."""

import json

import pytest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import client_of

from serving.http.app import create_app
from serving.http.settings import HttpSettings

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {}}}
PLAY = {"type": "function", "function": {"name": "play", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop", "description": "Stop."}}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(max_model_len=4096)  # its template shows the tools


@pytest.fixture(scope="module")
def client(engine):
    with client_of(create_app(engine, HttpSettings())) as made:
        yield made


def chat(client, **fields):
    body = {"messages": [USER], "max_tokens": 3, "tools": [PLAY, STOP], **fields}
    return client.post("/v1/chat/completions", json=body)


def schema_of(engine):
    return json.loads(engine.submitted[-1].sampling.structured_outputs.text)


def test_required_is_a_list_of_calls(client, engine):
    answer = chat(client, tool_choice="required")
    assert answer.status_code == 200, answer.text
    schema = schema_of(engine)
    assert schema["minItems"] == 1
    assert "maxItems" not in schema
    assert schema["$defs"] == {"n": {}}
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"const": "play"}
    assert first["properties"]["parameters"]["properties"] == SCHEMA["properties"]
    assert second["properties"]["parameters"] == {"type": "object", "maxProperties": 0}
    assert chat(client, tool_choice="required", parallel_tool_calls=False).status_code == 200
    assert schema_of(engine)["maxItems"] == 1


def test_a_function_is_its_parameters(client, engine):
    choice = {"type": "function", "function": {"name": "play"}}
    assert chat(client, tool_choice=choice).status_code == 200
    assert schema_of(engine) == SCHEMA


def test_none_is_text(client, engine):
    answer = chat(client, tool_choice="none").json()["choices"][0]
    assert "tool_calls" not in answer["message"]
    assert engine.submitted[-1].sampling.structured_outputs is None
    assert chat(client, tools=[], tool_choice="auto").status_code == 200


def function(**fields):
    return {"tools": [{"type": "function", "function": fields}], "tool_choice": "none"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "'auto' needs a server with --enable-auto-tool-choice"),
        ({"tool_choice": "auto"}, "'auto' needs a server with --enable-auto-tool-choice"),
        ({"tool_choice": "any"}, "must be 'none', 'auto', 'required' or a function"),
        ({"tool_choice": {"type": "function"}}, "'auto', 'required' or a function"),
        ({"tool_choice": {"function": {"name": "x"}}}, "names 'x', which is not among the tools"),
        ({"tools": [], "tool_choice": "required"}, "'required' needs tools"),
        (function(parameters={}), "tools.0.function.name"),
        (function(name="x" * 65), "tools.0.function.name"),
        (function(name="x", parameters={"type": "string"}), "tools.0.function.parameters"),
        ({"tools": [{"type": "search"}]}, "tools.0 must be of type function"),
        ({"tools": [STOP, STOP], "tool_choice": "none"}, "two functions of the name 'stop'"),
        ({"tools": [STOP] * 129}, "at most 128 entries, got 129"),
        (function(name="x", parameters={"not": {}}) | {"tool_choice": "required"}, "Unimplemented"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}], "tool_choice": "none"}, "names"),
    ],
)
def test_mistakes_are_named(client, engine, fields, message):
    before = len(engine.submitted)
    answer = chat(client, **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert len(engine.submitted) == before


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}],
)
def test_auto_excludes_a_structure(engine, fields):
    settings = HttpSettings(enable_auto_tool_choice=True, tool_call_parser="hermes")
    with client_of(create_app(engine, settings)) as client:
        answer = chat(client, **fields)
        assert answer.status_code == 400
        assert "exclude each other" in answer.json()["error"]["message"]
        assert chat(client, response_format={"type": "text"}).status_code == 200
        assert chat(client, tool_choice="none", **fields).status_code == 200


def test_completions_have_no_tools(client):
    answer = client.post("/v1/completions", json={"prompt": "hi", "tools": [PLAY]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
