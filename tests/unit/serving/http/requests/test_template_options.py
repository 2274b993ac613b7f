"""Chat-template options from a request body."""

import pytest

from serving.http.errors import ApiError
from serving.http.requests.protocol import ChatBody, TokenizeBody
from serving.http.requests.template_options import template_options

MESSAGES = [{"role": "user", "content": "hi"}]


def options(defaults=None, **body):
    return template_options(ChatBody(messages=MESSAGES, **body), defaults or {})


def test_by_default_an_answer_is_to_begin():
    assert options().as_arguments() == {"add_generation_prompt": True}
    assert options(add_generation_prompt=False).as_arguments() == {"add_generation_prompt": False}


def test_a_continued_message_has_no_answer_after_it():
    want = {"add_generation_prompt": False, "continue_final_message": True}
    assert options(continue_final_message=True).as_arguments() == want


def test_a_request_s_values_win_over_effort_over_the_server_s():
    got = options({"a": 0, "b": 0}, chat_template_kwargs={"b": 1}, reasoning_effort="none")
    assert got.variables == {"a": 0, "b": 1, "reasoning_effort": "none", "enable_thinking": False}
    got = options(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="none")
    assert got.variables["enable_thinking"] is True


@pytest.mark.parametrize("name", ["messages", "tools", "eos_token", "raise_exception", "a b", ""])
def test_what_the_server_fills_in_is_refused(name):
    with pytest.raises(ApiError, match="must not have") as error:
        options(chat_template_kwargs={name: 1})
    assert (error.value.status, error.value.param) == (400, "chat_template_kwargs")


def test_documents_are_a_variable_of_the_template():
    given = [{"title": "a", "text": "b"}]
    assert options(documents=given).variables == {"documents": given}
    assert options(documents=[]).variables == {}


def test_tokenize_takes_the_same():
    body = TokenizeBody.model_validate({"messages": MESSAGES, "chat_template_kwargs": {"x": 1}})
    assert template_options(body, {}).variables == {"x": 1}
