"""A stream's events are the bytes that each chunk has alone, whatever came before it."""

import pytest

from serving.http.answers.event_writer import EventWriter, event

HEAD = {"object": "text_completion", "id": "cmpl-1", "created": 7, "model": 'm"\u2028é'}
PLAIN = {"logprobs": None, "finish_reason": None, "stop_reason": None}


def completion(text, index=0, **fields):
    return {**HEAD, "choices": [{"index": index, "text": text, **PLAIN, **fields}]}


def chat(delta, index=0, **fields):
    return {**HEAD, "choices": [{"index": index, "delta": delta, **PLAIN, **fields}]}


CHUNKS = [
    completion("a"),
    completion(' b"\n\u2028é\\'),
    completion("", index=1),
    completion("c", index=1, logprobs={"tokens": ["c"]}),
    completion("d", token_ids=[1]),
    completion("e", finish_reason="stop"),
    completion("f", stop_reason=5),
    {**completion("g"), "usage": {"total_tokens": 3}},
    {**HEAD, "choices": []},
    {"error": {"message": "no"}},
    chat({"role": "assistant", "content": ""}),
    chat({"content": "a"}),
    chat({"content": "\x00b"}),
    chat({"content": None}),
    chat({"reasoning_content": "c"}),
    chat({"tool_calls": [{"index": 0}]}),
    chat({"content": "d"}, index=1),
    chat({"content": "e"}, token_ids=[1]),
    chat({"content": "f"}, finish_reason="length"),
]


@pytest.mark.parametrize("chunks", [CHUNKS, CHUNKS[::-1]], ids=["forth", "back"])
def test_each_chunk_has_the_bytes_that_it_has_alone(chunks):
    writer = EventWriter()
    for _ in range(2):
        for chunk in chunks:
            before = repr(chunk)
            assert writer.event(chunk) == event(chunk)
            assert repr(chunk) == before


def test_only_the_text_is_encoded_again(monkeypatch):
    writer, encoded = EventWriter(), []
    writer.event(completion("a"))
    monkeypatch.setattr(
        "serving.http.answers.event_writer.dumps", lambda value: encoded.append(value) or b'"x"'
    )
    assert writer.event(completion("b")) == event_of("x")
    assert encoded == ["b"]


def event_of(text):
    head = '{"object":"text_completion","id":"cmpl-1","created":7,"model":"m\\"\u2028é","choices":'
    rest = ',"logprobs":null,"finish_reason":null,"stop_reason":null}]}'
    return f'data: {head}[{{"index":0,"text":"{text}"{rest}\n\n'.encode()
