"""Thoughts, content and calls are the same however the stream is cut."""

import pytest

from serving.http.answers.message_reader import MessageReader

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

# The prompt opens the thoughts, text, thoughts, content.
CASES = [
    (
        False,
        "<think>\nWell, a < b.\n\nSo.\n</think>\n\nYes. </think>",
        "Well, a < b.\n\nSo.",
        "Yes. </think>",
    ),
    (False, "\n <think></think>Yes", "", "Yes"),
    (True, "Well.\n</think>\n\nYes\n", "Well.", "Yes\n"),
    (True, "<think> Well </thin", "<think> Well </thin", ""),
    (False, " Yes, <think>no</think> ", "", " Yes, <think>no</think> "),
    (False, "<thin", "", "<thin"),
    (False, "<thx <think>a</think>", "", "<thx <think>a</think>"),
    (False, "", "", ""),
]


def run(pieces, parser=None, reasoning="qwen3", **options):
    reader = MessageReader(parser, reasoning, **({"parallel": True} | options))
    parts = {"reasoning_content": "", "content": "", "tool_calls": []}
    for piece in pieces:
        for name, part in reader.feed(piece, ends=False).items():
            parts[name] += part
    for name, part in reader.feed("", ends=True).items():
        parts[name] += part
    return parts, reader


def cuts(text):
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


@pytest.mark.parametrize(("thinks", "text", "thoughts", "content"), CASES)
def test_thoughts_are_split_off_wherever_a_stream_is_cut(thinks, text, thoughts, content):
    for pieces in cuts(text):
        parts, _ = run(pieces, thinks=thinks)
        assert (parts["reasoning_content"], parts["content"]) == (thoughts, content)


@pytest.mark.parametrize(
    ("thinks", "text", "thoughts", "content"),
    [
        (False, " Well.\n</think>\n\nYes", "Well.", "Yes"),
        (False, "<think>\nWell.</think>Yes", "Well.", "Yes"),
        (True, "Well.</think>Yes", "Well.", "Yes"),
        (False, "</think>Yes", "", "Yes"),
        (False, "<thx </thin", "<thx </thin", ""),
        (False, "<thin", "<thin", ""),
        (False, "", "", ""),
    ],
)
def test_the_thoughts_of_deepseek_r1_need_no_opening_tag(thinks, text, thoughts, content):
    for pieces in cuts(text):
        parts, _ = run(pieces, reasoning="deepseek_r1", thinks=thinks)
        assert (parts["reasoning_content"], parts["content"]) == (thoughts, content)


def test_calls_in_thoughts_are_thoughts():
    text = f"<think>{CALL}</think>\n\nNow.\n{CALL}\n{CALL}"
    for pieces in cuts(text):
        parts, reader = run(pieces, "hermes")
        assert parts["reasoning_content"] == CALL
        assert parts["content"] == "Now."
        assert [(call.name, call.arguments) for call in reader.calls] == [("f", '{"a": 1}')] * 2


def test_without_parallel_calls_the_first_is_the_only_one():
    parts, reader = run(list(CALL + CALL), "hermes", None, parallel=False)
    assert {delta["index"] for delta in parts["tool_calls"]} == {0}
    assert len(reader.calls) == 1


def test_a_whole_message_has_the_parts():
    def reader(parser, reasoning):
        return MessageReader(parser, reasoning, parallel=True)

    assert reader(None, None).whole("a <think>", "so ") == {"content": "so a <think>"}
    assert reader(None, "qwen3").whole("<think>a</think>b", "") == {
        "content": "b",
        "reasoning_content": "a",
    }
    assert reader("hermes", "qwen3").whole("b", "") == {"content": "b", "reasoning_content": None}
    message = reader("hermes", None).whole(CALL, "")
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_a_format_gets_the_schemas_of_the_tools():
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    for parser in ("qwen3_coder", "qwen3_xml"):
        reader = MessageReader(parser, None, parallel=True, tools=[tool])
        (call,) = reader.whole(text, "")["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
