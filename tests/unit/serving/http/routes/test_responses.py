"""Responses over HTTP: whole, as events, with calls, thoughts and structures."""

import json
from collections.abc import Iterator

import httpx
import pytest
from support.doubles.fake_engine import SayingEngine
from support.processes.http_server import client_of

from serving.api.request import FinishReason
from serving.http.app import create_app
from serving.http.requests.responses import LOGPROBS
from serving.http.settings import HttpSettings

SAID = (
    "<think>\nHm.\n</think>\n\nSure.\n"
    '<tool_call>\n{"name": "play", "arguments": {"a": 1}}\n</tool_call>'
)
TOOLS = [{"type": "function", "name": "play"}]


@pytest.fixture
def saying() -> Iterator[tuple[SayingEngine, httpx.Client]]:
    engine = SayingEngine(SAID)
    settings = HttpSettings(
        enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    with client_of(create_app(engine, settings)) as client:
        yield engine, client


def respond(client, **body) -> dict:
    answer = client.post("/v1/responses", json={"input": "yo"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(client, **body) -> list[dict]:
    """The events of a stream, each under its own name."""
    with client.stream("POST", "/v1/responses", json={"input": "yo", "stream": True} | body) as s:
        blocks = "".join(s.iter_text()).removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        name, _, data = block.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_whole_response_has_openai_s_shape(client):
    got = respond(
        client, model="sql", max_output_tokens=3, instructions="be kind", metadata={"a": "b"}
    )
    assert got["id"].startswith("resp_") or got["id"].startswith("resp-")
    assert (got["object"], got["model"], got["store"]) == ("response", "sql", False)
    assert (got["status"], got["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert (got["instructions"], got["metadata"]) == ("be kind", {"a": "b"})
    (item,) = got["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert len(item["content"][0]["text"]) == 3
    usage = got["usage"]
    assert usage["output_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + 3


def test_thoughts_text_and_calls_are_items(saying):
    engine, client = saying
    got = respond(client, tools=TOOLS)
    assert [item["type"] for item in got["output"]] == ["reasoning", "message", "function_call"]
    thoughts, message, call = got["output"]
    assert thoughts["content"][0]["text"] == "Hm."
    assert message["content"][0]["text"] == "Sure."
    assert (call["name"], json.loads(call["arguments"])) == ("play", {"a": 1})
    assert got["status"] == "completed"
    used = got["usage"]
    assert 3 <= used["output_tokens_details"]["reasoning_tokens"] < used["output_tokens"]
    assert got["tools"] == TOOLS
    assert engine.submitted[-1].sampling.skip_special_tokens is False


@pytest.mark.parametrize("said", [SAID, "plain", "", "<think>Hm."])
def test_a_stream_ends_with_what_a_whole_response_is(saying, said):
    engine, client = saying
    engine.said = said
    whole, events = respond(client, tools=TOOLS), events_of(client, tools=TOOLS)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    last = events[-1]
    assert last["type"] == "response.completed"
    assert without_ids(last["response"]) == without_ids(whole)
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            place = event["output_index"]
            deltas[place] = deltas.get(place, "") + event["delta"]
    texts = [i.get("arguments") or i["content"][0]["text"] for i in last["response"]["output"]]
    assert [deltas.get(place, "") for place in range(len(texts))] == texts


def without_ids(response: dict) -> dict:
    random = {"id", "call_id", "created_at"}
    items = [{k: v for k, v in item.items() if k not in random} for item in response["output"]]
    return {k: v for k, v in response.items() if k not in random} | {"output": items}


def test_a_demanded_call_has_arguments_by_the_grammar(saying):
    engine, client = saying
    engine.said = '{"a": 1}'
    got = respond(client, tools=TOOLS, tool_choice={"type": "function", "name": "play"})
    (call,) = got["output"]
    assert (call["name"], call["arguments"]) == ("play", engine.said)
    engine.said = '[{"name": "play", "parameters": {}}, {"name": "play", "parameters": {"a": 2}}]'
    events = events_of(client, tools=TOOLS, tool_choice="required")
    output = events[-1]["response"]["output"]
    assert [item["arguments"] for item in output] == ["{}", '{"a": 2}']


def test_a_format_binds_the_text(saying):
    engine, client = saying
    engine.said = "{}"
    schema = {"type": "object", "maxProperties": 0}
    format = {"type": "json_schema", "name": "none", "schema": schema}
    got = respond(client, text={"format": format})
    assert got["output"][0]["content"][0]["text"] == "{}"
    assert got["text"]["format"] == format
    assert engine.submitted[-1].sampling.structured_outputs.kind == "json"


def test_logprobs_belong_to_the_text(saying):
    engine, client = saying
    engine.said = "<think>x</think>yo"
    events = events_of(client, include=[LOGPROBS], top_logprobs=1)
    (part,) = events[-1]["response"]["output"][-1]["content"]
    assert [entry["token"] for entry in part["logprobs"]][-2:] == ["y", "o"]
    assert "<" not in [entry["token"] for entry in part["logprobs"]]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [entry for e in deltas for entry in e["logprobs"]] == part["logprobs"]


@pytest.mark.parametrize(
    ("is_bad_request", "code"), [(False, "server_error"), (True, "invalid_prompt")]
)
def test_a_stream_that_fails_says_so_in_its_last_event(client, engine, is_bad_request, code):
    engine.fail = ("broke at /srv/x/y", False, is_bad_request)
    last = events_of(client, max_output_tokens=3)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": "broke at y"}


def test_an_abort_is_an_incomplete_response(saying):
    engine, client = saying
    engine.reason = FinishReason.ABORT
    assert respond(client)["status"] == "incomplete"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"input": None}, "input"),
        ({"model": "nobody"}, "`nobody` does not exist"),
        ({"max_output_tokens": 10**6}, "max_output_tokens is too large"),
        ({"max_output_tokens": 0.5}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, got 0."),
        ({"input": "x" * 999}, "exceeds model's maximum context length"),
        ({"tools": TOOLS}, "--enable-auto-tool-choice"),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools.0.name must have"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema must be"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type must be one of"),
        ({"vllm_xargs": {"x": 1}}, "vllm_xargs is not supported"),
        ({"store": True}, "store is not supported: no response is kept; leave it out"),
        ({"truncation": "auto"}, "truncation is not supported: an input that is too long is ref"),
    ],
)
def test_bad_bodies_name_the_field(client, body, text):
    answer = client.post("/v1/responses", json={"input": "yo"} | body)
    assert answer.status_code in (400, 404)
    assert text in answer.json()["error"]["message"]
    assert respond(client, max_output_tokens=1)["usage"]["output_tokens"] == 1


def test_channels_of_gpt_oss_are_items():
    engine = SayingEngine(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        " to=functions.play <|constrain|>json<|message|>{}"
    )
    settings = HttpSettings(
        enable_auto_tool_choice=True, tool_call_parser="openai", reasoning_parser="openai_gptoss"
    )
    with client_of(create_app(engine, settings)) as client:
        got = respond(client, tools=TOOLS)
        assert engine.submitted[-1].sampling.skip_special_tokens is False
        respond(client, text={"format": {"type": "json_object"}})
        assert engine.submitted[-1].sampling.skip_special_tokens is True
    thoughts, call = got["output"]
    assert thoughts["content"][0]["text"] == "Hm."
    assert (call["name"], call["arguments"]) == ("play", "{}")
