"""Structures are checked by name, bounded, and have one form whatever way they came."""

import dataclasses

import pytest

from serving.api.sampling import Sampling
from serving.api.structured_outputs import MAX_GRAMMAR_CHARS, MAX_JSON_DEPTH, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": [value]} if depth % 2 else {"a": value}
    return value


def test_a_schema_has_one_digest_as_object_and_as_text():
    one = StructuredOutputs(json=SCHEMA)
    other = StructuredOutputs(json='{"type": "object", "properties": {"a": {"type":"integer"}}}')
    assert one.digest == other.digest
    assert one.kind == "json"


def test_everything_that_changes_the_answer_changes_the_digest():
    ways = [
        StructuredOutputs(json=SCHEMA),
        StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
        StructuredOutputs(json=SCHEMA, whitespace_pattern=" "),
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex="a"),
        StructuredOutputs(grammar="a"),
        StructuredOutputs(choice=["a"]),
        StructuredOutputs(choice=["a", "b"]),
    ]
    assert len({way.digest for way in ways}) == len(ways)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json": "{"}, "structured_outputs.json is not valid JSON"),
        ({"json": '{"a": NaN}'}, "structured_outputs.json is not valid JSON"),
        ({"json": [1]}, "structured_outputs.json must be an object"),
        ({"json": {"a": {1, 2}}}, "JSON values only"),
        ({"json": nested(MAX_JSON_DEPTH + 2)}, "nested at most"),
        ({"json": nested(100_000)}, "nested at most"),
        ({"json": "[" * 100_000}, "not valid JSON"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "\ud800"}, "Unicode"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "at most"),
        ({"json": '"' + "a" * MAX_GRAMMAR_CHARS + '"'}, "at most"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice.1 must be a text"),
        ({"choice": [""]}, "structured_outputs.choice.0 must be a text"),
        ({"regex": "a\\"}, "ends with a backslash that escapes nothing"),
        ({"regex": "\\\\\\"}, "ends with a backslash that escapes nothing"),
        ({"grammar": 3}, "structured_outputs.grammar"),
        ({"json_object": "yes"}, "json_object must be true"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace"),
        ({"guided_json": {}}, "'guided_json' is not supported"),
        ({"regex": "a", "backend": "x"}, "'backend' is not supported"),
        ({"regex": "a", "disable_fallback": True}, "'disable_fallback' is not supported"),
        ({"regex": "a", "thoughts": "opened"}, "'thoughts' is not supported"),
    ],
)
def test_bad_structures_are_refused_by_name(fields, named):
    with pytest.raises(ValueError, match="structured_outputs") as caught:
        StructuredOutputs.of(fields)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 400


def test_fields_that_ask_for_nothing_are_left_out():
    """As in the whole object of a vLLM client."""
    off = {"disable_fallback": False, "disable_additional_properties": False, "_backend": None}
    given = {"regex": "a\\\\", "json": None, "disable_any_whitespace": False} | off
    assert StructuredOutputs.of(given) == StructuredOutputs(regex="a\\\\")


def test_sampling_takes_an_object_with_the_fields():
    sampling = Sampling(structured_outputs={"regex": "a+", "choice": None})
    assert sampling.structured_outputs == StructuredOutputs(regex="a+")
    assert dataclasses.replace(sampling, max_tokens=3).structured_outputs.kind == "regex"
    with pytest.raises(ValueError, match="must be an object"):
        Sampling(structured_outputs="a+")


def test_thoughts_are_another_structure_that_no_request_asks_for():
    plain, behind = (StructuredOutputs(regex="a", thoughts=t) for t in ("", "opened"))
    assert plain == StructuredOutputs(regex="a")
    assert plain.digest != behind.digest
    with pytest.raises(ValueError, match="'thoughts' is not supported"):
        StructuredOutputs.of({"regex": "a", "thoughts": "opened"})
    with pytest.raises(ValueError, match="thoughts must be one of"):
        StructuredOutputs(regex="a", thoughts="some")
