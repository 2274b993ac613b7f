"""One call of a function in an answer, as a JSON object that comes character by character."""

import json
import re
from typing import Any

from serving.http.answers.tool_calls import ToolCall

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*', re.DOTALL
)
_BARE = frozenset(" \t\r\n:,+-.0123456789Etruefalsn")  # outside of JSON's strings and brackets
_ARGUMENTS = ("arguments", "parameters")


class CallDeltas:
    """Text and calls of one choice, and what was added to them since they were last taken."""

    def __init__(self, id_of: Any = None):
        """`id_of()` makes the id of a call; None: as OpenAI's are."""
        self.calls: list[ToolCall] = []
        self._id_of = id_of
        self._content: list[str] = []
        self._changed: dict[int, tuple[bool, list[str]]] = {}  # by call: is it new, arguments

    def say(self, text: str) -> None:
        """Add text that is no call."""
        self._content.append(text)

    def begin(self, name: str) -> None:
        """Add a call without arguments."""
        call = ToolCall(name) if self._id_of is None else ToolCall(name, id=self._id_of())
        self.calls.append(call)
        self._changed[len(self.calls) - 1] = True, []

    def add(self, arguments: str) -> None:
        """Add to the arguments of the last call."""
        self._changed.setdefault(len(self.calls) - 1, (False, []))[1].append(arguments)

    def take(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the text and the deltas of calls since the last time, one for each call."""
        deltas = []
        for index, (is_new, parts) in self._changed.items():
            call, arguments = self.calls[index], "".join(parts)
            head = {"id": call.id, "type": "function"} if is_new else {}
            function = {"name": call.name} if is_new else {}
            deltas.append(
                {"index": index, **head, "function": {**function, "arguments": arguments}}
            )
            call.arguments += arguments
        content, self._content, self._changed = "".join(self._content), [], {}
        return content, deltas


class CallObject:
    """Reads one object. Arguments are passed on as they come if the name stands before them.

    Otherwise the object is read at its end. `raw` is its text as long as it is no call.
    """

    def __init__(self, deltas: CallDeltas, name: str | None = None):
        """With a `name` the whole object is the arguments of that function."""
        self._deltas = deltas
        self._text: list[str] = []
        self._depth = 0
        self._in_text = self._escaped = False
        self._is_head = name is None  # no bracket yet that could begin the arguments
        self._inner = 0 if name is not None else 1  # brackets around the arguments
        self.is_call = self._passes = name is not None
        if name is not None:
            deltas.begin(name)

    @property
    def raw(self) -> str:
        """The text of the object so far."""
        return "".join(self._text)

    def feed(self, char: str) -> bool | None:
        """Take a character: True when it ends the object, None if it cannot stand in one.

        In arguments only a tag cannot: a client sees other mistakes of the model.
        """
        if self._in_text:
            self._in_text = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_text = True
        elif char in "{[":
            if char == "{" and self._depth == 1 and self._is_head:
                self._read_head()
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif char == "<" if self._passes else char not in _BARE:
            self._read_whole()
            return None
        if self._passes:
            self._deltas.add(char)
            self._passes = self._depth > self._inner
        elif not self.is_call:
            self._text.append(char)
        if self._depth:
            return False
        self._read_whole()
        return True

    def _read_head(self) -> None:
        """Begin the call if name and key of the arguments are all that stands before them."""
        self._is_head = False
        match = _HEAD.fullmatch(self.raw)
        name = _parsed(match[1]) if match else None
        if isinstance(name, str) and name:
            self._deltas.begin(name)
            self.is_call = self._passes = True

    def _read_whole(self) -> None:
        """Take a complete object with name and arguments in another form as a call."""
        if self.is_call:
            return
        read = _parsed(self.raw)
        if not isinstance(read, dict) or not isinstance(read.get("name"), str) or not read["name"]:
            return
        key = next((key for key in _ARGUMENTS if key in read), None)
        if key is None:
            return
        arguments = {} if read[key] is None else read[key]
        if isinstance(arguments, str) and not isinstance(_parsed(arguments), dict):
            return
        if not isinstance(arguments, str | dict):
            return
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        self._deltas.begin(read["name"])
        self._deltas.add(text)
        self.is_call = True


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
