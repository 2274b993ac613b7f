"""Demanded tool calls in the text of an answer, as it comes: names, and arguments in pieces.

The text is bound by the grammar of `requests.tools`, so nothing else can stand in it. Pieces may
end anywhere: the deltas of a text add up to the same calls however it is cut.
"""

import dataclasses
import json
import re
import secrets
from typing import Any

_HEAD = re.compile(
    r'[\s,\[}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)', re.DOTALL
)


@dataclasses.dataclass
class ToolCall:
    """One call, with its arguments so far."""

    name: str
    arguments: str = ""
    id: str = dataclasses.field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_json(self) -> dict[str, Any]:
        """Return the call as a whole answer has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallReader:
    """Calls of one choice."""

    def __init__(self, name: str):
        """`name` is the one function whose arguments the text is; "": the text lists calls."""
        self._is_one = bool(name)
        self.calls: list[ToolCall] = []
        self._deltas: list[dict[str, Any]] = []
        self._head = ""  # of a call that has no arguments yet
        self._depth = 0  # of open brackets in the arguments
        self._in_text = self._escaped = False
        self._is_open = False
        if self._is_one:
            self._begin(name)

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Return the deltas of a piece of text, as chunks of a stream have them."""
        position = 0
        while position < len(text):
            if self._is_one:
                self._add(text[position:])
                break
            if self._is_open:
                end = self._end_of_arguments(text, position)
                self._add(text[position:end])
                position = end
            else:
                position = self._read_head(text, position)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read_head(self, text: str, position: int) -> int:
        """Read up to the arguments' first bracket; return where they begin, or the text's end."""
        before = len(self._head)
        bracket = text.find("{", position)
        while bracket >= 0:
            head = _HEAD.match(self._head + text[position : bracket + 1])
            if head and head.end() == before + bracket - position:
                self._head = ""
                self._begin(json.loads(head[1]))
                return bracket
            bracket = text.find("{", bracket + 1)
        self._head += text[position:]
        return len(text)

    def _begin(self, name: str) -> None:
        call = ToolCall(name)
        self.calls.append(call)
        self._is_open, self._depth = True, 0
        whole = call.as_json()
        self._deltas.append({"index": len(self.calls) - 1, **whole})

    def _add(self, arguments: str) -> None:
        self.calls[-1].arguments += arguments
        index = len(self.calls) - 1
        self._deltas.append({"index": index, "function": {"arguments": arguments}})

    def _end_of_arguments(self, text: str, start: int) -> int:
        """Return where the arguments end in the text: after their last bracket."""
        for at in range(start, len(text)):
            char = text[at]
            if self._in_text:
                self._in_text = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._is_open = False
                    return at + 1
        return len(text)


def joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return deltas with those of one call together, so that a chunk names each call once."""
    merged: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        call = merged.get(delta["index"])
        if call is None:
            merged[delta["index"]] = {**delta, "function": {**delta["function"]}}
        else:
            call["function"]["arguments"] += delta["function"]["arguments"]
    return list(merged.values())
