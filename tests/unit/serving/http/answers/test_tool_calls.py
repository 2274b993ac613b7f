"""Calls are the same however the stream is cut, and chunks add up to them."""

import json

import pytest

from serving.http.answers.tool_calls import ToolCallReader, joined

LISTED = [
    {"name": "play", "parameters": {"what": 'a "b" {c} [d] \\ }', "n": [1, {"x": {}}]}},
    {"name": 'o"dd', "parameters": {}},
    {"name": "größe", "parameters": {"": "]}"}},
]


def run(pieces, name=""):
    """The calls that the deltas add up to, and the reader."""
    reader, calls = ToolCallReader(name), {}
    for piece in pieces:
        for delta in joined(reader.feed(piece)):
            call = calls.setdefault(delta["index"], {"arguments": ""})
            call |= {k: delta[k] for k in ("id", "type") if k in delta}
            call |= {"name": delta["function"]["name"]} if "name" in delta["function"] else {}
            call["arguments"] += delta["function"]["arguments"]
    return [calls[i] for i in range(len(calls))], reader


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_calls_are_those_of_the_text_cut_at_every_character(indent, ascii_only):
    text = json.dumps(LISTED, indent=indent, ensure_ascii=ascii_only)
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for pieces in cuts:
        calls, reader = run(pieces)
        assert [call["name"] for call in calls] == [item["name"] for item in LISTED]
        read = [json.loads(call["arguments"]) for call in calls]
        assert read == [item["parameters"] for item in LISTED]
        assert [call.as_json()["function"]["arguments"] for call in reader.calls] == [
            call["arguments"] for call in calls
        ]
        assert len({call["id"] for call in calls}) == len(LISTED)


def test_one_function_takes_the_whole_text():
    text = json.dumps({"a": "{", "b": 1})
    for pieces in ([text], list(text)):
        calls, reader = run(pieces, "play")
        assert [(call["name"], call["arguments"]) for call in calls] == [("play", text)]
        assert reader.calls[0].arguments == text


def test_a_text_that_ends_early_has_what_there_is():
    text = json.dumps(LISTED)
    calls, _ = run([text[: text.index("[1") + 2]])
    assert [call["name"] for call in calls] == ["play"]
    assert calls[0]["arguments"].endswith("[1")
    assert run(['[{"name": "pl'])[0] == []
