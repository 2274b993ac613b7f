"""The stock openai client drives the server: completions, chat, streams, models."""

from typing import Literal

import openai
import pydantic
import pytest


@pytest.fixture(scope="module")
def client(server: str):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def base_name(client: openai.OpenAI) -> str:
    return next(m.id for m in client.models.list() if m.parent is None)


def test_models_name_the_base_as_parent_of_each_adapter(client, adapters):
    cards = {m.id: m.parent for m in client.models.list()}
    base = base_name(client)
    assert {parent for name, parent in cards.items() if name != base} == {base}
    assert cards.keys() > set(adapters)
    assert client.models.retrieve(adapters[0]).id == adapters[0]


def test_completion_of_every_adapter_differs_from_the_base(client, adapters):
    def text(model: str) -> str:
        answer = client.completions.create(
            model=model, prompt="User: ", max_tokens=24, temperature=0
        )
        assert answer.model == model
        return answer.choices[0].text

    texts = {name: text(name) for name in [base_name(client), *adapters]}
    assert len(set(texts.values())) == len(texts), texts


def test_stream_gives_the_same_text_and_usage(client, adapters):
    request = {"model": adapters[0], "prompt": "User: ", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**request)
    chunks = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert reasons[:-1] == [None] * (len(reasons) - 1)


def test_chat_and_its_stream_agree(client, adapters):
    request = {
        "model": adapters[0],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "max_completion_tokens": 16,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert streamed == whole.choices[0].message.content


def test_response_and_its_stream_agree(client, adapters):
    request = {
        "model": adapters[0],
        "instructions": "Answer.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        "max_output_tokens": 16,
        "temperature": 0,
    }
    whole = client.responses.create(**request)
    assert whole.output_text == whole.output[0].content[0].text
    with client.responses.stream(**request) as stream:
        told = list(stream)
    kinds, final = [event.type for event in told], told[-1].response
    assert final.output_text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(**request, stream=True))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text


def test_a_response_calls_a_function_and_takes_its_output(client, adapters):
    parameters = {
        "type": "object",
        "properties": {"what": {"type": "string", "maxLength": 8}},
        "required": ["what"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "name": "play", "parameters": parameters, "strict": True}]
    asked = {"role": "user", "content": "Play jazz"}
    request = {"model": adapters[0], "tools": tools, "max_output_tokens": 64, "temperature": 0}
    first = client.responses.create(input=[asked], tool_choice="required", **request)
    call = first.output[0]
    assert (call.type, call.name) == ("function_call", "play")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "playing"}
    again = client.responses.create(
        input=[asked, call.to_dict(), output], tool_choice="none", **request
    )
    assert again.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        client.responses.create(input="x", previous_response_id=first.id, **request)


def test_a_chat_is_parsed_by_its_schema_and_streams_a_demanded_call(client, adapters):
    class Forecast(pydantic.BaseModel):
        city: Literal["Paris", "Oslo"]
        days: Literal[1, 2, 3]

    asked = [{"role": "user", "content": "Weather in Oslo?"}]
    request = {"model": adapters[0], "messages": asked, "max_tokens": 64, "temperature": 0}
    parsed = client.chat.completions.parse(**request, response_format=Forecast)
    assert parsed.choices[0].message.parsed.city in ("Paris", "Oslo")
    parameters = openai.pydantic_function_tool(Forecast, name="forecast")
    call = {"tools": [parameters], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**request, **call) as stream:
        told = stream.get_final_completion()
    (made,) = told.choices[0].message.tool_calls
    assert made.function.name == "forecast"
    Forecast.model_validate_json(made.function.arguments)


def test_seed_n_logprobs_and_extra_body(client, adapters):
    request = {
        "model": adapters[1],
        "prompt": "User: ",
        "max_tokens": 8,
        "seed": 7,
        "n": 3,
        "logprobs": 2,
        "extra_body": {"top_k": 20, "ignore_eos": True},
    }
    first, second = (client.completions.create(**request) for _ in range(2))
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert len({c.text for c in first.choices}) > 1
    for choice in first.choices:
        assert len(choice.logprobs.token_logprobs) == 8
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)


def test_unknown_model_is_a_404_and_the_next_request_works(client, adapters):
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="x", max_tokens=1)
    assert client.completions.create(model=adapters[0], prompt="x", max_tokens=1).choices
