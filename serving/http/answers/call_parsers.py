"""Calls that a model makes by itself (tool_choice auto), in the formats of three families.

A parser takes the text of one choice character by character, so that its calls and its content are
the same however a stream is cut. Text that only looks like the beginning of a call is held until
it is known, and is content if it is none. White space around calls is dropped.

| parser | format |
| --- | --- |
| hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, after a text |
| llama3_json | the answer is `{"name": ..., "parameters": {...}}`, further ones after `;` |
| mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; `[TOOL_CALLS]name[ARGS]{...}` |
"""

import re
import secrets
import string
from abc import ABC, abstractmethod
from typing import Any

from serving.http.answers.call_object import CallDeltas, CallObject

_NAMED = re.compile(r"\s*([^\s\[\]{}]{1,64})\s*(?:\[CALL_ID\][^\[\]]{0,64})?(?:\[ARGS\])?\s*")
_MAX_NAMED = 192  # characters of a name with its marks


class AbstractCallParser(ABC):
    """Calls and content of one choice. A marker's first character stands in it only once."""

    open: str  # before calls
    close = ""  # after a call; it is no content

    def __init__(self, id_of: Any = None):
        self._deltas = CallDeltas(id_of)
        self._held = ""  # white space and a marker's beginning, or what follows a marker
        self._marker = ""  # so much of a marker
        self._state = self._in_text
        self._object: CallObject | None = None
        self._follows_call = False

    @property
    def calls(self) -> list[Any]:
        """The calls so far."""
        return self._deltas.calls

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return content and deltas of calls that a piece of the text brings."""
        for char in text:
            self._state(char)
        return self._deltas.take()

    def finish(self) -> str:
        """Return the content that was held, since no more text will come."""
        if self._object is not None:
            self._leave(self._object)
        if not self._follows_call or self._held.strip(" \t\r\n;,"):
            self._deltas.say(self._held)
        self._held = self._marker = ""
        return self._deltas.take()[0]

    @abstractmethod
    def _opened(self, char: str) -> None:
        """Take a character after the opening marker."""

    def _in_text(self, char: str) -> None:
        """Take a character outside of calls."""
        marker = self._marker + char
        markers = (self.open, self.close) if self._follows_call else (self.open,)
        if any(known.startswith(marker) for known in markers):
            self._marker, self._held = marker, self._held + char
            if marker == self.open:
                self._marker, self._state = "", self._opened
            elif marker == self.close:
                self._marker = self._held = ""
        elif self._marker:
            self._marker = ""
            self._to_text()
            self._in_text(char)
        elif char.isspace():
            self._held += char
        else:
            self._held += char
            self._to_text()

    def _to_text(self) -> None:
        """Make what is held content."""
        self._deltas.say(self._held)
        self._held, self._follows_call, self._state = "", False, self._in_text

    def _begin(self, name: str | None = None) -> None:
        """Read an object; its first bracket comes."""
        self._object = CallObject(self._deltas, name)
        self._state = self._in_object
        if name is not None:
            self._held = ""

    def _in_object(self, char: str) -> None:
        read = self._object
        if read is None:  # `_begin` makes one before this state
            raise RuntimeError("A call is read without an object.")
        ended = read.feed(char)
        if ended is False:
            if read.is_call and self._held:
                self._held = ""
            return
        self._leave(read)
        self._after_object() if self._follows_call else self._to_text()
        if ended is None:
            self._state(char)

    def _leave(self, read: CallObject) -> None:
        """Note whether what was read is a call; if not, it is held as text."""
        self._object, self._follows_call = None, read.is_call
        self._held = "" if read.is_call else self._held + read.raw

    def _after_object(self) -> None:
        """Go on after a call."""
        self._state = self._in_text


class HermesParser(AbstractCallParser):
    """Hermes and Qwen: each call between its own tags."""

    open, close = "<tool_call>", "</tool_call>"

    def _opened(self, char: str) -> None:
        if char == "{":
            self._begin()
            self._in_object(char)
        elif char.isspace():
            self._held += char
        else:
            self._to_text()
            self._in_text(char)


class MistralParser(AbstractCallParser):
    """Mistral: a list of calls after one marker, or a marker and a name before each call."""

    open = "[TOOL_CALLS]"

    def __init__(self) -> None:
        super().__init__(_short_id)
        self._is_list = False
        self._named = ""

    def finish(self) -> str:
        """Return the content that was held; a name without arguments is content."""
        self._held, self._named = self._held + self._named, ""
        return super().finish()

    def _opened(self, char: str) -> None:
        if char == "[" or char == "{":
            self._is_list = char == "["
            if self._is_list:
                self._held += char
                self._state = self._in_list
            else:
                self._begin()
                self._in_object(char)
        elif char.isspace():
            self._held += char
        else:
            self._state = self._in_name
            self._in_name(char)

    def _in_list(self, char: str) -> None:
        """Take a character between the calls of a list."""
        if char == "{":
            self._begin()
            self._in_object(char)
        elif char == "]" and self._follows_call:
            self._held, self._is_list, self._state = "", False, self._in_text
        elif char.isspace() or (char == "," and self._follows_call):
            self._held += char
        else:
            self._to_text()
            self._in_text(char)

    def _in_name(self, char: str) -> None:
        """Take a character of a name and of the marks behind it."""
        match = _NAMED.fullmatch(self._named) if char == "{" else None
        if match is not None:
            self._named, self._is_list = "", False
            self._begin(match[1])
            self._in_object(char)
        elif char == "{" or len(self._named) >= _MAX_NAMED:
            self._held, self._named = self._held + self._named, ""
            self._to_text()
            self._in_text(char)
        else:
            self._named += char

    def _after_object(self) -> None:
        self._state = self._in_list if self._is_list else self._in_text


class Llama3JsonParser(AbstractCallParser):
    """Llama 3: an answer is calls from its beginning, or it is content."""

    open = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._state = self._opened

    def _opened(self, char: str) -> None:
        """Take a character before a call: at the beginning, or after calls."""
        marker = self._marker + char
        if self.open.startswith(marker):
            self._held += char
            self._marker = "" if marker == self.open else marker
        elif self._marker:
            self._to_text()
            self._in_text(char)
        elif char == "{":
            self._begin()
            self._in_object(char)
        elif char.isspace() or (char in ";," and self._follows_call):
            self._held += char
        else:
            self._to_text()
            self._in_text(char)

    def _in_text(self, char: str) -> None:
        """Take a character of an answer that has no calls, or no further ones."""
        self._deltas.say(char)

    def _after_object(self) -> None:
        self._state = self._opened


def _short_id() -> str:
    """Return an id of 9 letters and digits, which is what Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


CALL_PARSERS = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
