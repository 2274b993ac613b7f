"""Calls between tags are the same however the stream is cut, with values of the schema's types."""

import json

import pytest

from serving.http.answers.tagged_calls import TaggedCallParser
from serving.http.answers.tool_calls import joined

TYPES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "wet": {"type": "boolean"},
    "more": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["number", "null"]},
}
TOOLS = [{"function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}}}]


def call(name, *parameters, end="</function>\n</tool_call>"):
    shown = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
    return f"<tool_call>\n<function={name}>\n{shown}{end}"


CASES = {
    "values": (
        "Well.\n\n"
        + call("f", ("city", "12"), ("days", "3"), ("wet", "True"), ("more", '{"a": [1]}'))
        + "\n"
        + call("f", ("maybe", "null"), ("either", "1.5"), ("days", "three"), ("new", "4")),
        "Well.",
        [
            ("f", {"city": "12", "days": 3, "wet": True, "more": {"a": [1]}}),
            ("f", {"maybe": None, "either": 1.5, "days": "three", "new": "4"}),
        ],
    ),
    "no parameters": (call("g"), "", [("g", {})]),
    "text within a value": (
        call("f", ("city", 'a\n<b> "c" </p\n')),
        "",
        [("f", {"city": 'a\n<b> "c" </p\n'})],
    ),
    "text behind": (call("g") + "\n\nDone. ", "\n\nDone. ", [("g", {})]),
    "no outer tag": ("So: <function=g>\n</function>", "So:", [("g", {})]),
    "no end of a value": (
        "<tool_call><function=f><parameter=city>a<parameter=days>1</function></tool_call>",
        "",
        [("f", {"city": "a", "days": 1})],
    ),
    "no end": (call("g", end="</function>"), "", [("g", {})]),
    "an end of the call alone": (call("g", end="</tool_call>"), "", [("g", {})]),
    "no call": ("a <tool_call> b", "a <tool_call> b", []),
    "no name": ("a <tool_call><function=> b", "a <tool_call><function=> b", []),
    "a long name": (f"<function={'n' * 80}>", f"<function={'n' * 80}>", []),
    "the beginning of a tag": ("a < b <tool_c", "a < b <tool_c", []),
    "only white space": (" \n", " \n", []),
}


def read(pieces):
    parser, content, deltas = TaggedCallParser(TOOLS), "", []
    for piece in pieces:
        said, more = parser.feed(piece)
        content, deltas = content + said, deltas + more
    return content + parser.finish(), deltas, parser.calls


@pytest.mark.parametrize("value", ["NaN", "1e999", r'["\ud800"]'])
def test_a_value_that_json_cannot_say_is_text(value):
    properties = {"x": {"type": ["number", "array"]}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    parser = TaggedCallParser(tools)
    parser.feed(call("f", ("x", value)))
    assert parser.calls[0].as_json()["function"]["arguments"] == json.dumps({"x": value})


@pytest.mark.parametrize("name", CASES)
def test_calls_and_content_wherever_a_stream_is_cut(name):
    text, content, calls = CASES[name]
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        said, deltas, found = read(pieces)
        assert said == content
        assert [(c.name, json.loads(c.arguments)) for c in found] == calls
        assert len({delta["index"] for delta in deltas}) == len(calls)
        arguments = ["" for _ in calls]
        for delta in joined(deltas):
            arguments[delta["index"]] += delta["function"]["arguments"]
        assert arguments == [c.arguments for c in found]


def test_a_call_that_is_cut_off_has_incomplete_arguments():
    text = call("f", ("city", "a"), ("days", "3"))
    _, _, (cut,) = read([text[: text.index("3")]])
    assert (cut.name, cut.arguments) == ("f", '{"city": "a"')


def test_without_schemas_values_are_text():
    parser = TaggedCallParser()
    parser.feed(call("f", ("days", "3")))
    assert parser.calls[0].arguments == '{"days": "3"}'


@pytest.mark.parametrize(
    "schema",
    [
        5,
        {"properties": [1]},
        {"properties": {"days": 5}},
        {"properties": {"days": {"type": 5, "anyOf": 6, "oneOf": [7, {"type": [8]}]}}},
    ],
)
def test_what_is_no_schema_says_no_type(schema):
    parser = TaggedCallParser([{"function": {"name": "f", "parameters": schema}}, {}])
    parser.feed(call("f", ("days", "3")))
    assert parser.calls[0].arguments == '{"days": "3"}'
