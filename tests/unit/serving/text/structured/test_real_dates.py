"""Formats of dates and times allow those that exist, wherever a schema has them."""

import json

import pytest
from llguidance import LLMatcher
from support.cases.grammar_cases import vocabulary

from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured.grammar_text import grammar_text
from serving.text.structured.real_dates import with_real_dates


@pytest.fixture(scope="module")
def fits():
    tokenizer = vocabulary().tokenizer()
    by_byte = {t[0]: i for i, t in enumerate(vocabulary().tokens) if len(t) == 1}

    def whether(schema, value):
        matcher = LLMatcher(tokenizer, grammar_text(StructuredOutputs(json=schema)), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = [by_byte[byte] for byte in json.dumps(value).encode()]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whether


CASES = {
    "date": (
        ["2020-02-29", "2000-02-29", "2021-02-28", "2021-12-31", "0004-02-29"],
        ["2021-02-29", "1900-02-29", "2020-02-30", "2021-04-31", "2021-13-01"],
    ),
    "date-time": (
        ["2020-02-29T10:00:00Z", "2021-12-31T23:59:59.5+01:00"],
        ["2021-02-29T10:00:00Z", "1998-12-31T23:58:60Z", "2021-12-31T24:00:00Z"],
    ),
    "time": (["23:59:59Z", "08:30:06.283185Z"], ["22:59:60Z", "24:00:00Z"]),
}


@pytest.mark.parametrize("format", CASES)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"pattern": "^[0-2]"},
        {"pattern": "^[0-2]", "allOf": [{"type": "string"}]},
    ],
)
def test_what_exists_fits_and_nothing_else(fits, format, schema):
    existing, others = CASES[format]
    assert all(fits(schema | {"format": format}, value) for value in existing)
    assert not any(fits(schema | {"format": format}, value) for value in others)


DATE = {"type": "string", "format": "date"}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {"format": DATE}, "required": ["format"]}, "format"),
        ({"$defs": {"d": DATE}, "properties": {"a": {"$ref": "#/$defs/d"}}}, "a"),
        ({"properties": {"a": {"anyOf": [DATE, {"type": "null"}]}}}, "a"),
        ({"additionalProperties": {"type": "array", "items": DATE}}, "b"),
        ({"additionalProperties": {"type": "array", "prefixItems": [DATE]}}, "b"),
    ],
)
def test_schemas_within_schemas_have_them_too(fits, schema, value):
    def of(date):
        return {value: [date] if value == "b" else date}

    assert fits(schema, of("2020-02-29"))
    assert not fits(schema, of("2021-02-29"))


def test_what_is_no_schema_stays_and_the_schema_itself_too():
    given = {
        "enum": [{"format": "date"}],
        "const": {"items": {"format": "date"}},
        "properties": {"format": {"const": "date"}, "a": True},
        "items": {"format": "uuid"},
        "format": ["date"],
    }
    before = json.dumps(given)
    assert with_real_dates(given) == given
    with_real_dates({"items": DATE})
    assert json.dumps(given) == before
    assert "pattern" not in DATE


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "a\\"},
        {"properties": {"x": {"items": {"pattern": "\\\\\\"}}}},
        {"patternProperties": {"a\\": {}}},
    ],
)
def test_a_pattern_that_would_lose_its_end_is_refused(schema):
    """llguidance drops a backslash at the end, and other answers would fit."""
    with pytest.raises(ValueError, match="ends with a backslash that escapes nothing"):
        with_real_dates(schema)
    fine = {"pattern": "a\\\\", "const": {"pattern": "a\\"}, "properties": {"pattern": {}}}
    assert with_real_dates(fine) == fine
