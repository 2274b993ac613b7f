"""Each kind of structure becomes the grammar of exactly its answers."""

import json
import time

import numpy as np
import pytest
from llguidance import LLMatcher
from support.cases.grammar_cases import vocabulary

from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured.grammar_text import grammar_text


@pytest.fixture(scope="module")
def fits():
    tokenizer = vocabulary().tokenizer()

    def whether(text, **fields):
        matcher = LLMatcher(tokenizer, grammar_text(StructuredOutputs(**fields)), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        by_byte = {t[0]: i for i, t in enumerate(vocabulary().tokens) if len(t) == 1}
        ids = [by_byte[byte] for byte in text.encode()]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whether


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "null"}}},
    "required": ["a"],
    "additionalProperties": False,
}


TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("text", "fitting"),
    [
        ('{"a":1}', True),
        ('{ "a" : 1 , "b" : [ null ] }', True),
        (json.dumps({"a": 1, "b": [None, None]}, indent=4), True),
        ('{\n\t"a": 1\n}', True),
        ('{"a":  1}', False),  # blanks without end are none
        ('{"b":[]}', False),
        ('{"a":1.5}', False),
        ('{"a":1}x', False),
    ],
)
def test_a_schema_binds_json_with_the_usual_spaces(fits, text, fitting):
    assert fits(text, json=SCHEMA) is fitting


def test_spaces_may_be_forbidden_or_said(fits):
    assert fits('{"a":1}', json=SCHEMA, disable_any_whitespace=True)
    assert not fits('{"a": 1}', json=SCHEMA, disable_any_whitespace=True)
    assert fits('{"a":    1}', json=SCHEMA, whitespace_pattern=" {0,4}")


def test_nothing_in_a_schema_loosens_it(fits):
    loose = {"x-guidance": {"lenient": True, "whitespace_flexible": True}}
    assert not fits('{"a": 1}', json=SCHEMA | loose, disable_any_whitespace=True)
    text = grammar_text(StructuredOutputs(json={"not": {}} | loose))
    matcher = LLMatcher(vocabulary().tokenizer(), text, log_level=0)
    assert 'Unimplemented keys: ["not"]' in matcher.get_error()


@pytest.mark.parametrize(
    ("text", "fields", "fitting"),
    [
        ('{ "a" : 1 }', {}, True),
        ('{"a":  1}', {}, False),
        ('{"a": 1}', {"disable_any_whitespace": True}, False),
        ('{"a":  1}', {"whitespace_pattern": " *"}, True),
        ('{"a":1.5}', {}, False),
    ],
)
def test_a_schema_within_a_grammar_binds_as_one_alone(fits, text, fields, fitting):
    assert (
        fits(f"<{text}>", grammar=f'start: "<" %json {json.dumps(SCHEMA)} ">"', **fields) is fitting
    )


def test_the_other_kinds(fits):
    assert fits('{"any": [1, {}]}', json_object=True)
    assert not fits("[1]", json_object=True)
    assert fits("aab", regex="a+b")
    assert not fits("aa", regex="a+b")
    odd = ['say "no"\n', "größe", "a\\b", "🎉"]
    assert all(fits(choice, choice=odd) for choice in odd)
    assert not fits("größ", choice=odd)
    assert fits("((x))", grammar='start: "x" | "(" start ")"')  # Lark
    assert fits("((x))", grammar='root ::= "x" | "(" root ")"')  # GBNF


WORD = {"type": "object", "properties": {"intent": {"type": "null"}}, "required": ["intent"]}


WORD_TAG = {
    "triggers": ["<"],
    "structures": [{"begin": "<intent>", "schema": {"type": "null"}, "end": ""}],
}
SKIPPING = '%llguidance {"allow_initial_skip": true}\n'


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('{"intent":null', {"json": WORD, "disable_any_whitespace": True}),
        ("intent: 17", {"regex": "intent: 17"}),
        ("intent: 17", {"choice": ["intent: 17"]}),
        ("intent: 17", {"grammar": 'start: "intent" ": 17"'}),
        ("intent: 17", {"grammar": SKIPPING + 'start: "intent: 17"'}),
        ("intent: 17", {"grammar": 'root ::= "intent" ": 17"'}),
        ("<intent>null", {"structural_tag": WORD_TAG}),
    ],
)
def test_the_model_chooses_the_tokens_of_a_text_without_a_choice(text, fields):
    """Each token that begins what is left may come: no token is forced on the model."""
    tokens = vocabulary().tokens
    grammar = grammar_text(StructuredOutputs(**fields))
    matcher = LLMatcher(vocabulary().tokenizer(), grammar, log_level=0)
    start = text.index("intent")
    assert matcher.consume_tokens([tokens.index(byte.encode()) for byte in text[:start]])
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    fitting = {
        i for i, token in enumerate(tokens) if token and text[start:].encode().startswith(token)
    }
    assert {b"i", b"intent"} <= {tokens[i] for i in fitting}
    assert set(np.flatnonzero(bits).tolist()) == fitting


TAGS = {
    "triggers": ["<call"],
    "structures": [
        {"begin": "<call=sum>", "schema": SCHEMA, "end": "</call>"},
        {"begin": "<call=now>", "schema": {"type": "object", "maxProperties": 0}, "end": ""},
    ],
}


@pytest.mark.parametrize(
    ("text", "fitting"),
    [
        ("no call at all", True),
        ('I call <call=sum>{"a": 1}</call> now', True),
        ('<call=sum>{"a": 1}</call><call=now>{}', True),
        ('<call=sum>{"a": "x"}</call>', False),
        ("<call=other>{}</call>", False),
    ],
)
def test_tags_bind_what_stands_between_them(fits, text, fitting):
    assert fits(text, structural_tag=TAGS) is fitting


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"triggers": []}, "triggers must be a list"),
        ({"triggers": ["<other"]}, "none of the triggers"),
        ({"structures": "x"}, "structures must be a list"),
        ({"structures": [1]}, "structures.0 must be an object"),
        ({"structures": [{"begin": "<call", "end": ""}]}, "structures.0.schema"),
        ({"structures": [{"begin": "<call", "schema": {}}]}, "structures.0.begin and .end"),
        ({"format": {}}, "structural_tag.format is not supported"),
    ],
)
def test_bad_tags_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match="structural_tag") as caught:
        grammar_text(StructuredOutputs(structural_tag=TAGS | change))
    assert named in str(caught.value)


def test_a_grammar_that_is_none():
    with pytest.raises(ValueError, match=r"structured_outputs\.grammar: No 'root' rule found"):
        grammar_text(StructuredOutputs(grammar='start ::= "a"'))


@pytest.mark.parametrize(
    ("text", "grammar"),
    [
        ("a", '?start: word\n?word: "a"'),
        ("::=", 'start: "::="'),
        ("a", '\n  root ::= word\nword ::= "a"'),
        ("a", 'root\t::= "a"'),
    ],
)
def test_only_a_rule_of_gbnf_makes_a_grammar_gbnf(fits, text, grammar):
    assert fits(text, grammar=grammar)


@pytest.mark.parametrize("text", ["\n" * 100_000, "a" * 100_000, "a\n" * 50_000, "a- " * 30_000])
def test_the_syntax_of_a_long_text_is_found_at_once(text):
    began = time.monotonic()
    assert grammar_text(StructuredOutputs(grammar=text)).startswith(text)
    assert time.monotonic() - began < 5


def test_errors_count_the_client_s_own_lines():
    text = grammar_text(StructuredOutputs(grammar="start: a\na: MISSING"))
    matcher = LLMatcher(vocabulary().tokenizer(), text, log_level=0)
    assert matcher.get_error().startswith('at 2(4): unknown name: "MISSING"')


JSON = '{"a":1}'


@pytest.mark.parametrize(
    ("thoughts", "text", "fitting"),
    [
        ("opened", 'Well {"a": 3} <b>\n</think>\n\n' + JSON, True),
        ("opened", f"</think>{JSON}", True),
        ("opened", JSON, False),  # the thoughts go on
        ("opened", f"a</think>{JSON}</think>{JSON}", False),
        ("opened", "a</think>x", False),
        ("optional", JSON, True),
        ("optional", f"<think>so</think>\n\n{JSON}", True),
        ("optional", f"<think>so</think>\n\n\n\n\n{JSON}", False),
        ("optional", f"\n{JSON}", False),  # blanks without end are none
        ("optional", f"so </think>{JSON}", False),
        ("always", f"so </think>{JSON}", True),
        ("always", f"<think>so</think>{JSON}", True),
        ("always", JSON, False),
    ],
)
def test_thoughts_come_before_a_structure(fits, thoughts, text, fitting):
    assert fits(text, json=SCHEMA, thoughts=thoughts) is fitting


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regex": "[0-9]+"}, "12"),
        ({"choice": ["a", "b"]}, "b"),
        ({"grammar": '%llguidance {"no_forcing": true}\nstart: "x" y\ny: /[a-z]+/'}, "xab"),
        ({"grammar": 'start: %json {"type": "null"}'}, "null"),
        ({"structural_tag": TAG}, f"so <f>{JSON}</f>"),
    ],
)
def test_every_kind_of_structure_may_have_thoughts_before_it(fits, fields, text):
    assert fits(f"<think>q</think>\n{text}", thoughts="optional", **fields)
    assert fits(text, thoughts="optional", **fields)
