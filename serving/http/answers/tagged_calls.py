"""Calls that Qwen3-Coder makes by itself: functions and parameters between tags.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is text of the type that the function's schema says. The arguments get a parameter once it
is whole. Calls and content are the same however a stream is cut.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from serving.http.answers.call_object import CallDeltas

_CALL, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_END_CALL, _END_FUNCTION, _END_PARAMETER = "</tool_call>", "</function>", "</parameter>"
_OPENINGS = re.compile(f"{_CALL}|{_FUNCTION}")
_INSIDE = re.compile(f"{_PARAMETER}|{_END_FUNCTION}|{_END_CALL}")
_AFTER_VALUE = re.compile(f"{_END_PARAMETER}|(?={_PARAMETER})|(?={_END_FUNCTION})")
_NAME = re.compile(r"([^<>\s]{1,64})\s*>")
_LONGEST = max(map(len, (_END_PARAMETER, _END_CALL, _END_FUNCTION)))
_MAX_NAME = 72  # characters up to the bracket behind a name
_MOST_TYPES = 16  # of a schema's alternatives that are looked at


class TaggedCallParser:
    """Calls and content of one choice."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None = None):
        """`tools` are the request's: their schemas give the types of values."""
        functions = [tool.get("function") for tool in tools or ()]
        self._properties = {
            f["name"]: _properties(f) for f in functions if isinstance(f, Mapping) and "name" in f
        }
        self._deltas = CallDeltas()
        self._text = ""  # that is not read yet
        self._looked = 0  # characters of it without the end of a value
        self._step: Callable[[], bool] = self._outside
        self._follows_call = False
        self._opening = self._function = self._key = ""
        self._num_keys = 0

    @property
    def calls(self) -> list[Any]:
        """The calls so far."""
        return self._deltas.calls

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return content and deltas of calls that a piece of the text brings."""
        self._text += text
        while self._step():
            pass
        return self._deltas.take()

    def finish(self) -> str:
        """Return the content that was held, since no more text will come."""
        if self._step in (self._outside, self._before_function):
            held = self._opening + self._text
            if held.strip() or not self._follows_call:
                self._deltas.say(held)
        self._text = self._opening = ""
        return self._deltas.take()[0]

    def _outside(self) -> bool:
        """Read content up to a tag that opens a call; each step returns whether to go on."""
        if self._follows_call and (closed := self._text.lstrip()).startswith(_END_CALL):
            self._text = closed[len(_END_CALL) :]
            return True
        found = _OPENINGS.search(self._text)
        if found is None:
            held = _held(self._text, self._follows_call)
            self._say(self._text[: len(self._text) - held])
            self._text = self._text[len(self._text) - held :]
            return False
        before = self._text[: found.start()]
        self._say(before.rstrip())
        # What turns out to be no call is content, with the white space in front of it.
        self._opening = before[len(before.rstrip()) :]
        if found[0] == _CALL:
            self._opening += _CALL
        self._text = self._text[found.end() if found[0] == _CALL else found.start() :]
        self._step = self._before_function
        return True

    def _say(self, text: str) -> None:
        if text:
            self._deltas.say(text)
            self._follows_call = False

    def _before_function(self) -> bool:
        """Read the tag with the function's name, or find that this is no call."""
        text = self._text.lstrip()
        if text.startswith(_FUNCTION):
            name = _NAME.match(text, len(_FUNCTION))
            if name is not None:
                self._text, self._opening = text[name.end() :], ""
                self._function, self._num_keys = name[1], 0
                self._deltas.begin(name[1])
                self._step = self._in_function
                return True
            if len(text) < len(_FUNCTION) + _MAX_NAME and ">" not in text:
                return False
        elif _FUNCTION.startswith(text):
            return False
        self._say(self._opening + self._text[:1])
        self._text, self._opening, self._step = self._text[1:], "", self._outside
        return True

    def _in_function(self) -> bool:
        """Read up to a parameter or to the end; what else stands there is dropped."""
        found = _INSIDE.search(self._text)
        if found is None:
            self._text = self._text[-_LONGEST:]
            return False
        if found[0] != _PARAMETER:
            self._deltas.add("}" if self._num_keys else "{}")
            self._text = self._text[found.end() if found[0] == _END_FUNCTION else found.start() :]
            self._follows_call, self._step = True, self._outside
            return True
        name = _NAME.match(self._text, found.end())
        if name is None:
            is_whole = ">" in self._text[found.end() :] or len(self._text) > found.end() + _MAX_NAME
            self._text = self._text[found.end() if is_whole else found.start() :]
            return is_whole
        self._key, self._text, self._looked = name[1], self._text[name.end() :], 0
        self._step = self._in_value
        return True

    def _in_value(self) -> bool:
        found = _AFTER_VALUE.search(self._text, self._looked)
        if found is None:
            self._looked = max(0, len(self._text) - _LONGEST)
            return False
        schema = self._properties.get(self._function, {}).get(self._key)
        value = _value(self._text[: found.start()], schema)
        key = json.dumps(self._key, ensure_ascii=False)
        shown = json.dumps(value, ensure_ascii=False)
        self._deltas.add(f"{', ' if self._num_keys else '{'}{key}: {shown}")
        self._num_keys += 1
        self._text, self._step = self._text[found.end() :], self._in_function
        return True


def _held(text: str, follows_call: bool) -> int:
    """Return how many characters at the end may belong to a tag, with white space before it."""
    tags = (_CALL, _FUNCTION, _END_CALL) if follows_call else (_CALL, _FUNCTION)
    start = text.rfind("<", -_LONGEST)
    is_tag = start >= 0 and any(tag.startswith(text[start:]) for tag in tags)
    kept = (text[:start] if is_tag else text).rstrip()
    return len(text) - len(kept)


def _value(text: str, schema: Any) -> Any:
    """Return the value of a parameter; text that is none of its type stays text.

    So does what Python reads and JSON in UTF-8 cannot say: NaN, 1e999, half of a surrogate pair.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    if not types or types == {"string"}:
        return text
    word = text.strip()
    try:
        read = json.loads({"True": "true", "False": "false", "None": "null"}.get(word, word))
        json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return text if "string" in types and not isinstance(read, dict | list | None) else read


def _types(schema: Any) -> set[str]:
    """Return the JSON types that a schema names, and its first alternatives."""
    alternatives = [schema]
    if isinstance(schema, Mapping):
        for key in ("anyOf", "oneOf"):
            given = schema.get(key)
            alternatives += given[:_MOST_TYPES] if isinstance(given, list) else []
    types: set[str] = set()
    for each in alternatives:
        given = each.get("type") if isinstance(each, Mapping) else None
        names = given[:_MOST_TYPES] if isinstance(given, list) else [given]
        types |= {name for name in names if isinstance(name, str)}
    return types


def _properties(function: Any) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters; what is no schema has none."""
    for key in ("parameters", "properties"):
        function = function.get(key) if isinstance(function, Mapping) else None
    return function if isinstance(function, Mapping) else {}
