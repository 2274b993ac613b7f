"""Answers of the checking process to one structure; tests of its handle hold its bounds."""

import io
import json

import pytest
from support.cases.grammar_cases import vocabulary

from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured import check_process


@pytest.fixture(scope="module")
def tokenizer():
    return vocabulary().tokenizer()


def test_a_structure_becomes_a_text_and_its_size(tokenizer):
    answer = check_process.try_grammar(StructuredOutputs(regex="a+"), tokenizer)
    assert "a+" in answer["text"]
    assert answer["bytes"] > 0


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"json": {"not": {}}}, 'structured_outputs.json: Unimplemented keys: ["not"]'),
        ({"json": {"$ref": "#"}}, "structured_outputs.json: no answer fits."),
        ({"json": {"enum": []}}, "structured_outputs.json"),
        ({"json": {"minimum": 10**400}}, "structured_outputs.json: number out of range"),
        ({"json": {"pattern": "a\\"}}, "structured_outputs.json: pattern 'a"),
        ({"json": {"patternProperties": 5}}, "structured_outputs.json"),
        (
            {"json": {"oneOf": [{"type": "string"}, {"type": "string"}]}},
            "structured_outputs.json: oneOf constraints are not supported. Use anyOf",
        ),
        ({"grammar": "???"}, "structured_outputs.grammar"),
        ({"structural_tag": {"triggers": []}}, "structural_tag.structures"),
    ],
)
def test_a_refusal_says_why(tokenizer, fields, why):
    answer = check_process.try_grammar(StructuredOutputs(**fields), tokenizer)
    assert answer["refused"].startswith(why)


def test_a_refusal_shows_the_client_s_lines_only(tokenizer):
    grammar = StructuredOutputs(grammar='start: MISSING\nb: "x"')
    assert check_process.try_grammar(grammar, tokenizer)["refused"].splitlines() == [
        'structured_outputs.grammar: at 1(8): unknown name: "MISSING"',
        "   1 | start: MISSING",
        "              ^",
        '   2 | b: "x"',
    ]


def test_a_panic_of_the_library_is_told_without_its_backtrace(tokenizer):
    many = "start: " + "%json {} " * 5000
    answer = check_process.try_grammar(StructuredOutputs(grammar=many), tokenizer)
    assert answer["refused"] == (
        "structured_outputs.grammar: llguidance cannot compile it: assertion failed: "
        "grammar.symbols.len() < u16::MAX as usize - 10."
    )


def test_every_kind_comes_through_the_lines(monkeypatch):
    monkeypatch.setattr(check_process, "_bound_memory", lambda: None)
    given = [
        StructuredOutputs(json={"type": "object"}, whitespace_pattern=" "),
        StructuredOutputs(json_object=True),
        StructuredOutputs(choice=["a", "b"]),
        StructuredOutputs(regex="a/b"),
    ]
    words = vocabulary()
    first = {"tokens": [t.decode("latin-1") for t in words.tokens]}
    first |= {"special_ids": list(words.special_ids), "end_ids": list(words.end_ids)}
    names = ("kind", "text", "disable_any_whitespace", "whitespace_pattern")
    lines = [{name: getattr(outputs, name) for name in names} for outputs in given]
    answers = io.StringIO()
    check_process._serve(io.StringIO("\n".join(map(json.dumps, [first, *lines]))), answers)
    ready, *texts = map(json.loads, answers.getvalue().splitlines())
    assert ready == {}
    assert all("text" in answer for answer in texts)
    for word, answer in zip(['" "', '"object"', "CHOICE", "start: "], texts, strict=True):
        assert word in answer["text"]
