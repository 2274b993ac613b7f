"""Channels of GPT-OSS's format (harmony) in an answer's text: thoughts, content and calls.

The prompt ends with `<|start|>assistant`; an answer is a row of messages, such as

    <|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>Yes.

`analysis` has thoughts, `final` and `commentary` have content, and a message `to=functions.NAME`
is a call. The text is taken character by character: how it is cut changes nothing.
"""

import re
from collections.abc import Callable
from typing import Any

from serving.http.answers.call_object import CallDeltas

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_FIRST = (_CHANNEL, _START, _MESSAGE, " to=", "to=")  # an answer in this format begins so
_MAX_HEADER = 256  # characters
_NAME = re.compile(r"to=(?:functions\.)?([^\s<]{1,64})")
_KIND = re.compile(r"<\|channel\|>\s*([a-z]{1,16})")


class HarmonyReader:
    """Reads the text of one choice; text in no such message is content."""

    def __init__(self, prompt: str = "", *, with_calls: bool):
        """`prompt` is the text before the answer, which may stand in a message already.

        Without `with_calls` a call's message is content.
        """
        self._with_calls = with_calls
        self._deltas = CallDeltas()
        self._thoughts: list[str] = []
        self._said = {"analysis": False, "final": False}  # whether such a message was there
        self._state: Callable[[str], None] = self._in_header
        self._header = ""
        self._marker = ""  # so much of what may end a message
        self._is_first = True  # no header has been complete yet
        self._put: Callable[[str], None] = self._deltas.say
        tail = prompt.rpartition(_START)[2] if _START in prompt else ""
        if _MESSAGE in tail:
            self._is_first = False  # the tail begins with a role
            self.feed(tail, ends=False)

    @property
    def calls(self) -> list[Any]:
        """The calls so far."""
        return self._deltas.calls

    def feed(self, text: str, ends: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """Return thoughts, content and deltas of calls of a piece; `ends`: it is the last."""
        for char in text:
            self._state(char)
        if ends:
            held = self._marker
            if self._state == self._in_header and self._is_first:
                held = self._header  # it began like a header and is none
            self._marker = self._header = ""
            if held:
                self._put(held)
        content, deltas = self._deltas.take()
        thoughts, self._thoughts = "".join(self._thoughts), []
        return thoughts, content, deltas

    def _in_header(self, char: str) -> None:
        """Take a character before a message's text."""
        self._header += char
        header = self._header
        if header.endswith(_MESSAGE):
            self._header, self._is_first = "", False
            self._begin(header)
            return
        is_one = not self._is_first or any(
            header.startswith(first) or first.startswith(header) for first in _FIRST
        )
        if not is_one or len(header) > _MAX_HEADER:
            self._header, self._is_first = "", False
            self._put, self._state = self._deltas.say, self._in_message
            for held in header:
                self._in_message(held)

    def _begin(self, header: str) -> None:
        """Begin the message of a header."""
        self._state = self._in_message
        name, kind = _NAME.search(header), _KIND.search(header)
        if kind is not None and kind[1] == "analysis":
            self._put = self._thoughts_put
            self._separate("analysis")
        elif name is not None and self._with_calls:
            self._deltas.begin(name[1])
            self._put = self._deltas.add
        else:
            self._put = self._deltas.say
            self._separate("final")

    def _thoughts_put(self, text: str) -> None:
        self._thoughts.append(text)

    def _separate(self, kind: str) -> None:
        """Put a line's end between two messages of a kind."""
        if self._said[kind]:
            self._put("\n")
        self._said[kind] = True

    def _in_message(self, char: str) -> None:
        marker = self._marker + char
        if any(end.startswith(marker) for end in _ENDS):
            self._marker = marker
            if marker in _ENDS:
                self._marker, self._state = "", self._in_header
        elif self._marker:
            self._put(self._marker)
            self._marker = ""
            self._in_message(char)
        else:
            self._put(char)
