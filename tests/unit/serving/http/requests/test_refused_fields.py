"""Fields that are not served: refused by name, with what to send in place of them."""

import json

import pytest

from serving.http.errors import ApiError
from serving.http.requests.protocol import ChatBody, CompletionBody
from serving.http.requests.refused_fields import check_fields


def completion(**fields) -> CompletionBody:
    return CompletionBody.model_validate_json(json.dumps({"prompt": "a"} | fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_json": {}}, r'guided_json .*: send structured_outputs {"json": SCHEMA}, or resp'),
        ({"guided_choice": ["a"]}, "guided_choice .* structured_outputs .*choice"),
        ({"priority": 3}, "priority .*send 0"),
        ({"chat_template": "x"}, "chat_template .*--chat-template"),
        ({"use_beam_search": True}, "use_beam_search .*send n"),
        ({"tools": [1]}, "tools .*/v1/chat/completions"),
        ({"adapter_id": "law"}, "adapter_id .*as model"),
        ({"lora_request": {"lora_name": "law"}}, "lora_request .*as model"),
        ({"merged_adapters": {"ids": ["law"]}}, "merged_adapters .*send adapters"),
        ({"parameters": {"adapter_id": "law"}}, "parameters .*in the body itself.*as model"),
        ({"sampling_params": {"max_new_tokens": 1}}, "sampling_params .*as max_tokens"),
        ({"max_new_tokens": 1}, "max_new_tokens .*send max_tokens"),
        ({"do_sample": False}, "do_sample .*send temperature 0"),
    ],
)
def test_a_refusal_says_what_to_send(fields, text):
    with pytest.raises(ApiError, match=text) as refused:
        check_fields(completion(**fields))
    assert (refused.value.status, refused.value.param) == (400, next(iter(fields)))


def test_what_asks_for_nothing_is_supported():
    check_fields(completion(tools=None, suffix="", priority=0, thinking_token_budget=-1))
    check_fields(completion(adapter_id=None, parameters={}, do_sample=True, no_stop_trim=False))
    check_fields(completion(length_penalty=1.2))  # it acts on a beam search only
    check_fields(ChatBody(messages=[], tools=[], tool_choice="none"))


def test_a_second_name_that_says_the_same_is_taken():
    """As from clients that send one body to several kinds of servers, and 1.0 as 1."""
    both = {"model": "law", "max_tokens": 8, "min_tokens": 1, "ignore_eos": True, "temperature": 0}
    others = {"adapter_id": "law", "lora_name": "law", "max_new_tokens": 8, "min_new_tokens": 1}
    others |= {"ignore_eos_token": True, "do_sample": False}
    check_fields(completion(**both, **others, typical_p=1))
    for name, value in others.items():
        with pytest.raises(ApiError, match=f"{name} is not supported"):
            check_fields(completion(**{name: value}))
        differ = {"model": "sql", "max_tokens": 9, "ignore_eos": False, "temperature": 0.5}
        with pytest.raises(ApiError, match=f"{name} is not supported"):
            check_fields(completion(**differ, **{name: value}))


def test_the_type_of_a_value_counts():
    with pytest.raises(ApiError, match="use_beam_search"):
        check_fields(completion(use_beam_search=0))
