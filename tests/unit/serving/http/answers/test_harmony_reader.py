"""GPT-OSS's channels become thoughts, content and calls, wherever a stream is cut."""

import pytest

from serving.http.answers.harmony_reader import HarmonyReader
from serving.http.answers.message_reader import MessageReader
from serving.http.settings import HARMONY, HARMONY_CALLS

THOUGHT = "<|channel|>analysis<|message|>Well, a < b.<|end|>"
CALL = " to=functions.play <|constrain|>json<|message|>"
NEXT = "<|start|>assistant"
PREAMBLE = f"{NEXT}<|channel|>commentary<|message|>Let me see.<|end|>"
FINAL = f"{NEXT}<|channel|>final<|message|>"

# The prompt, the answer, thoughts, content, calls.
CASES = [
    ("", f"{THOUGHT}{FINAL}Yes.<|return|>", "Well, a < b.", "Yes.", {}),
    ("", f"{THOUGHT}{FINAL}Yes.", "Well, a < b.", "Yes.", {}),
    ("", "<|channel|>final<|message|>a <|en b <|x|>", "", "a <|en b <|x|>", {}),
    ("", "<|channel|>analysis<|message|>Wel", "Wel", "", {}),
    ("", f"{THOUGHT}<|start|>assistant<|chan", "Well, a < b.", "", {}),
    ("", "Yes, <|channel|> is a mark.", "", "Yes, <|channel|> is a mark.", {}),
    ("", "<|chan", "", "<|chan", {}),
    ("", "", "", "", {}),
    ("", f"{THOUGHT}{THOUGHT}{FINAL}Yes.", "Well, a < b.\nWell, a < b.", "Yes.", {}),
    (
        "",
        f'{THOUGHT}{PREAMBLE}{NEXT}<|channel|>commentary{CALL}{{"a": 1}}<|call|>',
        "Well, a < b.",
        "Let me see.",
        {0: ("play", '{"a": 1}')},
    ),
    (
        "",
        f"{NEXT} to=functions.play<|channel|>commentary json<|message|>{{}}<|call|>"
        f"{NEXT}<|channel|>commentary{CALL}[]",
        "",
        "",
        {0: ("play", "{}"), 1: ("play", "[]")},
    ),
    ("hi<|start|>assistant", f"{THOUGHT}{FINAL}Yes.", "Well, a < b.", "Yes.", {}),
    ("<|start|>assistant<|channel|>final<|message|>Ye", "s.<|return|>", "", "s.", {}),
    ("<|start|>assistant<|channel|>analysis<|message|>W", "ell<|end|>", "ell", "", {}),
]


def run(prompt, pieces):
    reader = HarmonyReader(prompt, with_calls=True)
    thoughts, content, calls = "", "", {}
    for piece, ends in [*((piece, False) for piece in pieces), ("", True)]:
        read = reader.feed(piece, ends)
        thoughts, content = thoughts + read[0], content + read[1]
        for delta in read[2]:
            name, arguments = calls.get(delta["index"], (delta["function"].get("name"), ""))
            calls[delta["index"]] = name, arguments + delta["function"]["arguments"]
    assert {i: (call.name, call.arguments) for i, call in enumerate(reader.calls)} == calls
    return thoughts, content, calls


@pytest.mark.parametrize(("prompt", "text", "thoughts", "content", "calls"), CASES)
def test_channels_are_split_wherever_a_stream_is_cut(prompt, text, thoughts, content, calls):
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for pieces in cuts:
        assert run(prompt, pieces) == (thoughts, content, calls)


def test_a_header_without_end_is_content():
    text = "<|channel|>" + "x" * 300
    assert run("", [text]) == ("", text, {})


def test_without_tools_a_call_is_content():
    reader = MessageReader(None, HARMONY, parallel=True)
    message = reader.whole(f"{THOUGHT}{NEXT}<|channel|>commentary{CALL}{{}}<|call|>", "")
    assert message == {"content": "{}", "reasoning_content": "Well, a < b."}


def test_without_parallel_calls_the_first_is_the_only_one():
    reader = MessageReader(HARMONY_CALLS, HARMONY, parallel=False)
    call = f"{NEXT}<|channel|>commentary{CALL}{{}}<|call|>"
    message = reader.whole(THOUGHT + call + call, "")
    assert message["content"] is None
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["play"]
