"""Bodies: every field nullable, strict about types, open to what it does not know."""

import json

import pytest
from pydantic import ValidationError

from serving.http.requests.protocol import (
    MAX_LOGIT_BIAS,
    ChatBody,
    ClassifyBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

WRONG = {
    "int": ["1", 1.5, True, [1], {}],
    "float": ["1", True, [1], {}],
    "bool": ["true", 1, 0, [], {}],
    "str": [1, True, [], {}],
}


def fields_of(kind, name: str) -> list[str]:
    """Optional fields of a model whose type is `name | None`."""
    types = {"int": int, "float": float, "bool": bool, "str": str}
    return [f for f, info in kind.model_fields.items() if info.annotation == types[name] | None]


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, TokenizeBody])
def test_every_optional_field_takes_null(kind):
    body = {f: None for f, info in kind.model_fields.items() if not info.is_required()}
    if kind is ChatBody:
        body["messages"] = []
    kind.model_validate_json(json.dumps(body))


@pytest.mark.parametrize("name", list(WRONG))
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_wrong_types_are_not_converted(kind, name):
    fields = fields_of(kind, name)
    assert fields
    for field in fields:
        for value in WRONG[name]:
            body = {"messages": [], field: value}
            with pytest.raises(ValidationError, match=field):
                kind.model_validate_json(json.dumps(body))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none(value):
    with pytest.raises(ValidationError):
        CompletionBody.model_validate_json(f'{{"temperature": {value}}}')
    with pytest.raises(ValidationError):
        CompletionBody.model_validate_json(f'{{"logit_bias": {{"1": {value}}}}}')


def test_an_integer_is_a_number():
    assert CompletionBody.model_validate_json('{"temperature": 1}').temperature == 1.0


def test_unknown_fields_are_kept_apart():
    body = CompletionBody.model_validate_json('{"frobnicate": {"a": [1]}, "tools": [1]}')
    assert body.model_extra == {"frobnicate": {"a": [1]}, "tools": [1]}


def test_tokens_are_integers():
    with pytest.raises(ValidationError):
        DetokenizeBody.model_validate_json('{"tokens": [true]}')


def test_a_large_bias_is_one_error_however_many_entries_are_wrong():
    biases = {str(i): "x" for i in range(MAX_LOGIT_BIAS + 1)}
    with pytest.raises(ValidationError, match=f"at most {MAX_LOGIT_BIAS} entries") as refused:
        CompletionBody.model_validate_json(json.dumps({"prompt": "a", "logit_bias": biases}))
    assert refused.value.error_count() == 1


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ClassifyBody])
def test_a_list_of_adapters_is_told_to_be_several_requests(kind):
    with pytest.raises(ValidationError, match="one name, not a list: send a request for each"):
        kind.model_validate_json('{"lora_path": ["law", null], "messages": []}')
