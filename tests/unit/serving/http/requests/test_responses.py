"""Bodies of the Responses API as chats, and what is refused by name."""

import pytest

from serving.http.errors import ApiError
from serving.http.requests.protocol import ResponsesBody
from serving.http.requests.responses import LOGPROBS, chat_of, own_names


def chat(**body):
    return chat_of(ResponsesBody.model_validate({"input": "yo"} | body), 16)


def messages(given, **body):
    dumped = [m.model_dump(exclude_none=True) for m in chat(input=given, **body).messages]
    return [{k: v for k, v in message.items() if v is not None} for message in dumped]


def test_a_text_is_a_user_s_message_after_the_instructions():
    assert messages("yo") == [{"role": "user", "content": "yo"}]
    assert messages("yo", instructions="be kind")[0] == {"role": "system", "content": "be kind"}


def test_messages_for_the_system_at_the_beginning_become_one():
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]
    found = messages(given, instructions="a")
    assert [m["role"] for m in found] == ["system", "user", "system"]
    assert [part["text"] for part in found[0]["content"]] == ["a", "b"]
    plain = messages([{"role": "developer", "content": "b"}], instructions="a")
    assert plain == [{"role": "system", "content": "a\n\nb"}]


def test_very_many_messages_for_the_system_cost_what_they_are_long():
    """Before: each was appended to all before it, minutes for a body of 16 MB."""
    given = [{"role": "system", "content": f"{n:04d}" * 10} for n in range(5000)]
    made = chat_of(ResponsesBody.model_validate({"input": given}), 5000).messages
    assert [m.role for m in made] == ["system"]
    assert made[0].content == "\n\n".join(item["content"] for item in given)


def test_calls_and_their_outputs_are_the_assistant_s_and_the_tool_s():
    no_part = {"type": "input_text", "text": "no"}
    given = [
        {"role": "user", "content": "Music!"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "S"}]},
        {"type": "function_call", "call_id": "c1", "name": "play", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "stop", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        {"type": "function_call_output", "call_id": "c2", "output": [no_part]},
        {"type": "function_call", "call_id": "c3", "name": "play", "arguments": "{}"},
    ]
    found = messages(given)
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [call["id"] for call in found[1]["tool_calls"]] == ["c1", "c2"]
    assert found[1]["tool_calls"][0]["function"] == {"name": "play", "arguments": "{}"}
    assert [m["tool_call_id"] for m in found[2:4]] == ["c1", "c2"]
    assert found[3]["content"] == [{"type": "text", "text": "no"}]


def test_images_are_parts_with_a_url():
    given = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]
    assert messages(given)[0]["content"] == [{"type": "image_url", "image_url": {"url": "data:x"}}]


def test_options_are_those_of_a_chat():
    schema = {"type": "object"}
    body = chat(
        max_output_tokens=7,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        tools=[{"type": "function", "name": "play", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "play"},
        include=[LOGPROBS],
        top_logprobs=2,
        seed=5,
        top_k=3,
        user="u",
        store=False,
        truncation="disabled",
    )
    assert (body.max_completion_tokens, body.reasoning_effort) == (7, "low")
    assert body.response_format["json_schema"] == {"name": "n", "schema": schema, "strict": True}
    function = {"name": "play", "parameters": schema}
    assert body.tools == [{"type": "function", "function": function}]
    assert body.tool_choice == {"type": "function", "function": {"name": "play"}}
    assert (body.logprobs, body.top_logprobs) == (True, 2)
    assert (body.seed, body.top_k, body.user) == (5, 3, "u")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"seed": "x"}, "seed"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 17}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ],
)
def test_what_is_not_served_is_named(body, param):
    with pytest.raises(ApiError) as caught:
        chat(**body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("message", "param", "want", "own"),
    [
        ("messages.3: max_completion_tokens 9", "messages", "input: max_output_tokens 9", "input"),
        (
            "response_format.json_schema.schema is",
            "response_format",
            "text.format.schema is",
            "text",
        ),
        ("tools.0.function.name must", "tools", "tools.0.name must", "tools"),
    ],
)
def test_errors_of_the_chat_use_the_body_s_names(message, param, want, own):
    with pytest.raises(ApiError) as caught, own_names():
        raise ApiError(400, message, param=param)
    assert (caught.value.message, caught.value.param) == (want, own)
