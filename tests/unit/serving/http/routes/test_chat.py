"""Chat completions: messages of every form, streams, log-probabilities."""

import json
import logging

import pytest
from support.doubles.fake_engine import FakeEngine, SayingEngine, letters
from support.processes.http_server import client_of

from serving.api.sampling import Sampling
from serving.http.app import create_app
from serving.http.settings import HttpSettings

USER = {"role": "user", "content": "yo"}
PROMPT = b"[user]yo[assistant]"  # what the fake template makes of USER


def chat(client, **body) -> dict:
    answer = client.post("/v1/chat/completions", json={"messages": [USER]} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(adapter: str | None, index: int, count: int) -> str:
    return "".join(map(chr, letters(list(PROMPT), adapter, index, count)))


def test_answer_has_openai_s_shape(client):
    answer = chat(client, max_tokens=3, model="sql", n=2)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "sql"
    messages = [c["message"] for c in answer["choices"]]
    assert messages == [{"role": "assistant", "content": text("sql", i, 3)} for i in range(2)]
    assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


def test_without_max_tokens_the_context_is_the_limit(client):
    assert chat(client)["usage"]["total_tokens"] == 64


def test_what_a_request_does_not_set_is_the_model_s_default(client, engine):
    engine.model_info.sampling_defaults.update(temperature=0.5, max_tokens=7)
    assert chat(client)["usage"]["completion_tokens"] == 7
    assert engine.submitted[-1].sampling.temperature == 0.5
    assert chat(client, temperature=0, max_tokens=9)["usage"]["completion_tokens"] == 9
    assert engine.submitted[-1].sampling.temperature == 0
    client.post("/v1/completions", json={"prompt": "x"})
    assert engine.submitted[-1].sampling == Sampling(temperature=0.5, max_tokens=16)


def test_text_parts_are_text(client):
    parts = [{"type": "text", "text": "y"}, {"type": "input_text", "text": "o"}]
    whole = chat(client, messages=[{"role": "user", "content": "y\no"}], max_tokens=3)
    answer = chat(client, messages=[{"role": "user", "content": parts}], max_tokens=3)
    assert answer["choices"] == whole["choices"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"image_url": "http://10.0.0.1/x.png"},
        {"type": "input_audio", "input_audio": {}},
        {},
    ],
)
def test_other_parts_are_refused(client, part):
    body = {"messages": [{"role": "user", "content": [part]}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "text only" in answer.json()["error"]["message"]
    assert "10.0.0.1" not in answer.text


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": None},
        {"messages": "hi"},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        {"messages": [USER], "top_logprobs": 2},
        {"messages": [USER], "logprobs": True, "top_logprobs": 21},
        {"messages": [USER], "logprobs": 1},
        {"messages": [USER], "tools": [{"type": "function"}]},
        {"messages": [USER], "tool_choice": "required"},
        {"messages": [USER], "response_format": {"type": "json_schema"}},
        {"messages": [USER], "chat_template": "{{ 7 * 7 }}"},
        {"messages": [USER], "chat_template_kwargs": {"messages": []}},
        {"messages": [USER], "chat_template_kwargs": {"a-b": 1}},
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
        {"messages": [USER], "vllm_xargs": {"x": 1}},
        {"messages": [USER], "thinking_token_budget": 9},
        {"messages": [USER], "mm_processor_kwargs": {"x": 1}},
        {"messages": [USER], "priority": 1},
        {"messages": [USER], "max_completion_tokens": 46},
        {"messages": [{"role": "user", "content": "x" * 64}]},
    ],
)
def test_bad_bodies_name_the_field(client, body):
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] in body
    assert error["code"] == 400


def test_logprobs_have_bytes_and_alternatives(client):
    choice = chat(client, max_tokens=2, logprobs=True, top_logprobs=2)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == choice["message"]["content"]
    assert [e["bytes"] for e in entries] == [[ord(e["token"])] for e in entries]
    assert [len(e["top_logprobs"]) for e in entries] == [2, 2]
    assert chat(client, max_tokens=1)["choices"][0]["logprobs"] is None


def test_stream_starts_with_the_role_and_ends_with_usage(client):
    body = {"messages": [USER], "max_completion_tokens": 3, "stream": True, "n": 2}
    body |= {"stream_options": {"include_usage": True}, "logprobs": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        blocks = "".join(answer.iter_text()).removesuffix("\n\n").split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    chunks = [json.loads(b.removeprefix("data: ")) for b in blocks]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    for index in range(2):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == text(None, index, 3)
        assert [c["finish_reason"] for c in mine] == [None, None, None, "length"]
        logprobs = [e["token"] for c in mine[1:] for e in c["logprobs"]["content"]]
        assert "".join(logprobs) == text(None, index, 3)


def test_token_ids_and_prompt_logprobs_stand_beside_the_choices(client):
    answer = chat(client, max_tokens=2, return_token_ids=True, prompt_logprobs=0)
    assert answer["prompt_token_ids"] == list(PROMPT)
    assert answer["choices"][0]["token_ids"] == letters(list(PROMPT), None, 0, 2)
    assert len(answer["prompt_logprobs"]) == len(PROMPT)


def test_token_ids_and_prompt_logprobs_of_a_stream_come_once(client):
    more = {"max_tokens": 2, "n": 2, "return_token_ids": True, "prompt_logprobs": 0}
    body = {"messages": [USER], "stream": True} | more
    answer = client.post("/v1/chat/completions", json=body).text
    chunks = [json.loads(x[6:]) for x in answer.splitlines() if x.startswith("data: {")]
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [list(PROMPT)]
    (logprobs,) = [c["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c]
    whole = chat(client, max_tokens=2, prompt_logprobs=0)
    assert logprobs == whole["prompt_logprobs"]


def test_a_model_without_a_template_says_so(client, engine, monkeypatch):
    def none(messages, add_generation_prompt=True):
        raise ValueError("The model has no chat template.")

    monkeypatch.setattr(engine.tokenizer, "apply_chat_template", none)
    answer = client.post("/v1/chat/completions", json={"messages": [USER]})
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]["message"]


def prompt_of(engine, client, **body) -> str:
    chat(client, max_tokens=1, **body)
    return engine.tokenizer.decode(engine.submitted[-1].ids)


def test_the_template_gets_what_the_request_says(engine, client):
    got = prompt_of(engine, client, chat_template_kwargs={"enable_thinking": False})
    assert got == "{enable_thinking=False}[user]yo[end][assistant]"
    got = prompt_of(engine, client, reasoning_effort="low", add_generation_prompt=False)
    assert got.startswith("{reasoning_effort=low}{enable_thinking=True}[user]yo")


def test_the_last_message_can_be_continued(engine, client):
    body = {"messages": [USER, {"role": "assistant", "content": "so"}]}
    for more in ({}, {"add_generation_prompt": False}):
        got = prompt_of(engine, client, **body, **more, continue_final_message=True)
        assert got == "[user]yo[assistant]so"


def test_echo_puts_the_last_message_in_front_of_its_continuation(client):
    body = {"messages": [USER, {"role": "assistant", "content": "so "}], "max_tokens": 2}
    body |= {"continue_final_message": True}
    plain, echoed = chat(client, **body), chat(client, **body, echo=True)
    texts = [a["choices"][0]["message"]["content"] for a in (plain, echoed)]
    assert texts[1] == "so " + texts[0]
    with client.stream(
        "POST", "/v1/chat/completions", json={**body, "echo": True, "stream": True}
    ) as s:
        chunks = [json.loads(line[6:]) for line in s.iter_lines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == texts[1]
    # A message of another role than the answer's is not its beginning.
    alone = chat(client, messages=[USER], max_tokens=2, echo=True)["choices"][0]["message"]
    assert not alone["content"].startswith("yo")


def test_settings_of_the_server_reach_chat_answers(caplog):
    settings = HttpSettings(
        response_role="bot",
        default_template_kwargs={"a": 1},
        tokens_as_ids=True,
        force_include_usage=True,
        log_requests=True,
    )
    caplog.set_level(logging.INFO)
    engine = FakeEngine()
    with client_of(create_app(engine, settings)) as client:
        got = chat(client, max_tokens=1, logprobs=True, stop=["secret"])
        body = {"messages": [USER], "max_tokens": 1, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            chunks = [json.loads(x[6:]) for x in answer.iter_lines() if x.startswith("data: {")]
    assert engine.tokenizer.decode(engine.submitted[0].ids).startswith("{a=1}[user]yo")
    assert got["choices"][0]["message"]["role"] == "bot"
    assert got["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    assert chunks[-1]["usage"]["completion_tokens"] == 1
    lines = [r.getMessage() for r in caplog.records if "Request chatcmpl-" in r.getMessage()]
    assert "to /v1/chat/completions for fake-base: " in lines[0]
    assert "max_tokens=1" in lines[0]
    assert "secret" not in caplog.text
    assert "[user]yo" not in caplog.text
    assert "a stream" in lines[1]


TOOLS = [{"type": "function", "function": {"name": "play"}}]
THOUGHTS_AND_CALLS = (
    "<think>\nMusic.\n</think>\n\nSure.\n"
    '<tool_call>\n{"name": "play", "arguments": {"what": "jazz"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "play", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def saying():
    engine = SayingEngine(THOUGHTS_AND_CALLS)
    settings = HttpSettings(
        enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    with client_of(create_app(engine, settings)) as client:
        yield engine, client


def streamed(client, **body):
    """The message that the chunks of a stream add up to, and the reasons of its end."""
    message, reasons = {"calls": {}}, []
    body = {"messages": [USER], "stream": True} | body
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        chunks = [json.loads(x[6:]) for x in answer.iter_lines() if x.startswith("data: {")]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        reasons += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
        for name in ("content", "reasoning_content"):
            message[name] = message.get(name, "") + choice["delta"].get(name, "")
        for delta in choice["delta"].get("tool_calls", ()):
            call = message["calls"].setdefault(delta["index"], {"arguments": ""})
            call["arguments"] += delta["function"].pop("arguments")
            call |= delta["function"]
    return message, reasons


def test_a_model_calls_tools_by_itself(saying):
    engine, client = saying
    choice = chat(client, tools=TOOLS)["choices"][0]
    message = choice["message"]
    assert (message["role"], message["content"]) == ("assistant", "Sure.")
    assert message["reasoning_content"] == "Music."
    functions = [call["function"] for call in message["tool_calls"]]
    assert [json.loads(f["arguments"]) for f in functions] == [{"what": "jazz"}, {}]
    assert choice["finish_reason"] == "tool_calls"
    assert engine.submitted[-1].sampling.skip_special_tokens is False
    assert engine.submitted[-1].sampling.structured_outputs is None

    parts, reasons = streamed(client, tools=TOOLS, tool_choice="auto")
    assert (parts["content"], parts["reasoning_content"]) == ("Sure.", "Music.")
    assert list(parts["calls"].values()) == functions
    assert reasons == ["tool_calls"]
    one, _ = streamed(client, tools=TOOLS, parallel_tool_calls=False)
    assert list(one["calls"].values()) == functions[:1]


def test_thoughts_have_both_names_of_vllm_or_are_left_out(saying):
    _, client = saying
    message = chat(client, tools=TOOLS)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Music."
    message = chat(client, tools=TOOLS, include_reasoning=False)["choices"][0]["message"]
    assert not {"reasoning", "reasoning_content"} & message.keys()
    assert message["content"] == "Sure."
    body = {"messages": [USER], "stream": True, "tools": TOOLS}
    for more, want in (({}, "Music."), ({"include_reasoning": False}, "")):
        answer = client.post("/v1/chat/completions", json=body | more).text
        chunks = [json.loads(x[6:]) for x in answer.splitlines() if x.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == want
        assert "".join(delta.get("content", "") for delta in deltas) == "Sure."


def test_without_tools_calls_are_content(saying):
    engine, client = saying
    text = THOUGHTS_AND_CALLS.partition("</think>\n\n")[2]
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = chat(client, **fields)["choices"][0]
        assert choice["message"]["content"] == text
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert streamed(client, **fields)[0]["content"] == text
    assert engine.submitted[-1].sampling.skip_special_tokens


def test_a_prompt_can_open_the_thoughts(saying):
    engine, client = saying
    engine.said = "Music.</think>Sure."
    opened = [USER, {"role": "assistant", "content": "<think>\n"}]
    body = {"messages": opened, "continue_final_message": True}
    message = chat(client, **body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Music.", "Sure.")
    message = chat(client)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, engine.said)


def test_a_structure_and_demanded_calls_come_after_thoughts(saying):
    engine, client = saying
    engine.said = '<think>\nMusic.\n</think>\n\n"a"'
    body = {"structured_outputs": {"json": {"const": "a"}}}
    message = chat(client, **body)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Music.", '"a"')
    assert engine.submitted[-1].sampling.structured_outputs.thoughts == "optional"
    parts, _ = streamed(client, **body)
    assert (parts["reasoning_content"], parts["content"]) == ("Music.", '"a"')

    engine.said = '<think>Music.</think>[{"name": "play", "parameters": {"what": "jazz"}}]'
    choice = chat(client, tools=TOOLS, tool_choice="required")["choices"][0]
    assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Music.", "tool_calls")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "play"
    parts, _ = streamed(client, tools=TOOLS, tool_choice="required")
    assert (parts["reasoning_content"], len(parts["calls"])) == ("Music.", 1)


def test_a_structure_alone_has_no_thoughts(saying):
    """The prompt has closed them, or the body wants none."""
    engine, client = saying
    engine.said = "<think>"
    body = {"structured_outputs": {"choice": ["<think>"]}}
    closed = [USER, {"role": "assistant", "content": "<think>\n\n</think>\n\n"}]
    for more in (
        {"include_reasoning": False},
        {"messages": closed, "continue_final_message": True},
    ):
        assert chat(client, **body, **more)["choices"][0]["message"]["content"] == "<think>"
        assert not engine.submitted[-1].sampling.structured_outputs.thoughts
