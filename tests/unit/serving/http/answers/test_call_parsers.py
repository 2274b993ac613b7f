"""Calls that a model makes by itself are the same however the stream is cut."""

import codecs
import json

import pytest

from lora_jax.finetune.assets.calls import as_record
from serving.http.answers.call_parsers import CALL_PARSERS
from serving.http.answers.tool_calls import joined
from serving.http.settings import HARMONY_CALLS, TAGGED_CALLS, TOOL_CALL_PARSERS

NESTED = {"what": 'a "b" {c} [d] \\ }</tool_call>', "n": [1, {"x": {}}], "ü": None}
PLAY = json.dumps({"name": "play", "arguments": NESTED})
STOP = '{"name":"stop","parameters":{}}'
LATE = '{"arguments": {"a": {}}, "name": "late"}'
TEXT = '{"name": "play", "arguments": "{\\"a\\": 1}"}'

# Format, text, content, names and arguments.
CASES = {
    "hermes": (
        "hermes",
        f"Well.\n<tool_call>\n{PLAY}\n</tool_call>\n<tool_call>{STOP}</tool_call>\n",
        "Well.",
        [("play", NESTED), ("stop", {})],
    ),
    "hermes, arguments first": (
        "hermes",
        f"<tool_call>{LATE}</tool_call><tool_call>{TEXT}</tool_call>",
        "",
        [("late", {"a": {}}), ("play", {"a": 1})],
    ),
    "hermes, no end": ("hermes", f"<tool_call>{STOP}", "", [("stop", {})]),
    "hermes, a bracket is missing": (
        "hermes",
        f"<tool_call>{PLAY[:-1]}</tool_call>\n<tool_call>{STOP}</tool_call>",
        "",
        [("play", NESTED), ("stop", {})],
    ),
    "hermes, text around": (
        "hermes",
        f"a <<tool_call>{STOP}</tool_call> b </tool_call>",
        "a < b </tool_call>",
        [("stop", {})],
    ),
    "hermes, only text": ("hermes", "if a < b:\n  <tool {x}\n\n", None, []),
    "hermes, a tag in text": ("hermes", 'the <tool_call> {"tag": {}} <tool_call> x', None, []),
    "hermes, no call": ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
    "hermes, cut off": ("hermes", '<tool_call>\n{"name": "pl', None, []),
    "llama3": ("llama3_json", f"{PLAY}; {STOP}", "", [("play", NESTED), ("stop", {})]),
    "llama3, tag": ("llama3_json", f"<|python_tag|>{STOP}\n", "", [("stop", {})]),
    "llama3, type first": (
        "llama3_json",
        '\n{"type": "function", "name": "f", "parameters": {"a": 1}}',
        "",
        [("f", {"a": 1})],
    ),
    "llama3, only text": ("llama3_json", f"Well. {STOP}", None, []),
    "llama3, other object": ("llama3_json", '{"name": "Bob", "age": 3} {}\n', None, []),
    "llama3, no object": ("llama3_json", "{hello} <|python", None, []),
    "llama3, text after": ("llama3_json", f"{STOP}\nDone.", "\nDone.", [("stop", {})]),
    "mistral": (
        "mistral",
        f"Well. [TOOL_CALLS] [{PLAY}, {STOP}]",
        "Well.",
        [("play", NESTED), ("stop", {})],
    ),
    "mistral, names": (
        "mistral",
        f"[TOOL_CALLS]play[ARGS]{json.dumps(NESTED)}[TOOL_CALLS]st-op{{}}[TOOL_CALLS]x"
        '[CALL_ID]abc123def[ARGS]{"a": 1}',
        "",
        [("play", NESTED), ("st-op", {}), ("x", {"a": 1})],
    ),
    "mistral, only text": ("mistral", "a[0] = [TOOL] [TOOL_CALLS", None, []),
    "mistral, no list": ("mistral", "[TOOL_CALLS] [3, 4] x", None, []),
    "mistral, a name alone": ("mistral", "[TOOL_CALLS]play the {", None, []),
    "mistral, a long name": ("mistral", "[TOOL_CALLS]" + "x" * 300, None, []),
}


def run(name, pieces):
    """The content and the calls that the deltas add up to."""
    parser, calls, content = CALL_PARSERS[name](), {}, ""
    for piece in pieces:
        text, deltas = parser.feed(piece)
        content += text
        assert joined(deltas) == deltas  # each call once
        for delta in deltas:
            call = calls.setdefault(delta["index"], {"arguments": ""})
            call |= {"name": delta["function"]["name"], "id": delta["id"]} if "id" in delta else {}
            call["arguments"] += delta["function"]["arguments"]
    content += parser.finish()
    made = [calls[i] for i in range(len(calls))]
    assert made == [
        {"arguments": call.arguments, "name": call.name, "id": call.id} for call in parser.calls
    ]
    return content, [(call["name"], call["arguments"]) for call in made]


def cuts(text):
    return [list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


@pytest.mark.parametrize("case", CASES)
def test_a_stream_cut_at_every_character_has_the_calls_of_the_text(case):
    name, text, content, calls = CASES[case]
    whole = run(name, [text])
    assert whole[0] == (text if content is None else content)
    assert [(function, json.loads(arguments)) for function, arguments in whole[1]] == calls
    for pieces in cuts(text):
        assert run(name, pieces) == whole


def test_calls_of_the_shipped_adapter_cut_at_every_byte():
    """In the format of `lora_jax.finetune.assets.calls`; half a character waits for the rest."""
    record = as_record(("播放", "Music-Play", {"artist": "周杰伦", "play_mode": ["随机", 1]}))
    text = record.answer.encode()
    name, arguments = "Music-Play", {"artist": "周杰伦", "play_mode": ["随机", 1]}
    for at in range(1, len(text)):
        decoder = codecs.getincrementaldecoder("utf-8")()
        content, calls = run("hermes", [decoder.decode(text[:at]), decoder.decode(text[at:])])
        assert (content, [call[0] for call in calls]) == ("", [name])
        assert json.loads(calls[0][1]) == arguments
    decoder = codecs.getincrementaldecoder("utf-8")()
    single = run("hermes", [decoder.decode(bytes([byte])) for byte in text])
    assert single == run("hermes", [text.decode()])


@pytest.mark.parametrize("case", CASES)
def test_an_answer_that_ends_anywhere_is_cut_in_every_way_alike(case):
    name, text, _, _ = CASES[case]
    for end in range(len(text)):
        assert run(name, list(text[:end])) == run(name, [text[:end]])


def test_arguments_come_before_the_call_ends():
    parser = CALL_PARSERS["hermes"]()
    _, deltas = parser.feed('<tool_call>{"name": "play", "arguments": {"what": "ja')
    assert deltas[0]["function"] == {"name": "play", "arguments": '{"what": "ja'}
    assert parser.feed("zz")[1] == [{"index": 0, "function": {"arguments": "zz"}}]


def test_mistakes_in_arguments_reach_the_client():
    text = '<tool_call>{"name": "f", "arguments": {"a": True, }}</tool_call>'
    assert run("hermes", [text]) == ("", [("f", '{"a": True, }')])


def test_ids_of_mistral_are_those_that_its_templates_take():
    parser = CALL_PARSERS["mistral"]()
    parser.feed("[TOOL_CALLS]f{}[TOOL_CALLS]g{}")
    first, second = (call.id for call in parser.calls)
    assert first != second
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in (first, second))


@pytest.mark.parametrize("piece", ["{", '{"name": "x", "a": {}, ', "<tool_call>{", "[TOOL_CALLS]["])
@pytest.mark.parametrize("name", CALL_PARSERS)
def test_absurd_texts_are_content(name, piece):
    text = piece * 5000
    content, calls = run(name, [text])
    assert (content, calls) == (text, [])


def test_settings_name_the_parsers():
    assert set(TOOL_CALL_PARSERS) == {*CALL_PARSERS, *TAGGED_CALLS, HARMONY_CALLS}
