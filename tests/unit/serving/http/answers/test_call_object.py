"""An object that comes character by character: where it ends, and whether it is a call."""

import pytest

from serving.http.answers.call_object import CallDeltas, CallObject


def read(text, name=None):
    """What each character gave, the object and the calls."""
    deltas = CallDeltas()
    item = CallObject(deltas, name)
    ends = []
    for char in text:
        ends.append(item.feed(char))
        if ends[-1] is not False:
            break
    deltas.take()
    return ends, item, [(call.name, call.arguments) for call in deltas.calls]


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "arguments": {"a": "}"}, "id": 3}', ("f", '{"a": "}"}')),
        ('{"id": {}, "name": "f", "parameters": {"a": "ü"}}', ("f", '{"a": "ü"}')),
        ('{"name": "f", "arguments": null}', ("f", "{}")),
        ('{"name": "\\u0066", "arguments": {}}', ("f", "{}")),
    ],
)
def test_calls(text, call):
    ends, item, calls = read(text)
    assert ends == [False] * (len(text) - 1) + [True]
    assert item.is_call
    assert calls == [call]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f"}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "x"}',
        "{]",
        "{" + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_no_calls(text):
    ends, item, calls = read(text)
    assert ends[-1] is True
    assert not item.is_call
    assert (item.raw, calls) == (text, [])


def test_what_cannot_stand_in_an_object_ends_it():
    ends, item, _ = read('{"a": <')
    assert ends[-1] is None
    assert item.raw == '{"a": '


def test_a_named_function_takes_the_whole_object():
    assert read('{"a": {}}', "f")[2] == [("f", '{"a": {}}')]


def test_deltas_name_a_call_once():
    deltas = CallDeltas()
    deltas.say("a")
    deltas.begin("f")
    deltas.add("{")
    content, (first,) = deltas.take()
    assert (content, first["index"], first["function"]) == ("a", 0, {"name": "f", "arguments": "{"})
    deltas.add("}")
    assert deltas.take() == ("", [{"index": 0, "function": {"arguments": "}"}}])
    assert deltas.calls[0].arguments == "{}"
