"""Parts of a chat answer in its text, as it comes: thoughts, content and calls of tools."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.api.request import FinishReason
from serving.http.answers.call_parsers import CALL_PARSERS, AbstractCallParser
from serving.http.answers.generation import Generation
from serving.http.answers.harmony_reader import HarmonyReader
from serving.http.answers.tagged_calls import TaggedCallParser
from serving.http.answers.tool_calls import ToolCallReader, joined
from serving.http.requests.protocol import ChatBody
from serving.http.requests.tools import auto_parser, demanded_calls
from serving.http.settings import ALWAYS_THOUGHTS, HARMONY, TAGGED_CALLS, HttpSettings

_OPEN, _CLOSE = "<think>", "</think>"


class ThoughtReader:
    """Splits a text that may begin with thoughts between tags, without white space around them.

    The text is taken character by character: how it is cut changes nothing.
    """

    def __init__(self, is_open: bool, *, always: bool = False):
        """`is_open`: the prompt ends with the opening tag. `always`: the text begins with thoughts
        also where no tag opens them.
        """
        self._state = self._skip if is_open else self._before
        self._always = always
        self._held = ""  # white space, and the beginning of a tag
        self._tag = ""
        self._after = self._in_thoughts
        self._thoughts: list[str] = []
        self._content: list[str] = []

    def feed(self, text: str, ends: bool) -> tuple[str, str]:
        """Return the thoughts and the content that a piece brings; `ends`: it is the last."""
        for char in text:
            self._state(char)
        if ends:
            is_content = self._state == self._before and not self._always
            (self._content if is_content else self._thoughts).append(self._held)
            self._held = ""
        parts = "".join(self._thoughts), "".join(self._content)
        self._thoughts, self._content = [], []
        return parts

    def _before(self, char: str) -> None:
        """Take a character of what may be the opening tag."""
        tag = self._tag + char
        if _OPEN.startswith(tag):
            self._held, self._tag = self._held + char, tag
            if tag == _OPEN:
                self._held = self._tag = ""
                self._state = self._skip
        elif char.isspace() and not self._tag:
            self._held += char
        elif self._always:
            held, self._held, self._tag = self._held.lstrip() + char, "", ""
            self._state = self._in_thoughts
            for each in held:
                self._state(each)
        else:
            self._content.append(self._held + char)
            self._held, self._state = "", self._in_content

    def _skip(self, char: str) -> None:
        """Drop white space after a tag."""
        if not char.isspace():
            self._state = self._after
            self._state(char)

    def _in_thoughts(self, char: str) -> None:
        tag = self._tag + char
        if _CLOSE.startswith(tag):
            self._held, self._tag = self._held + char, tag
            if tag == _CLOSE:
                self._held = self._tag = ""
                self._state, self._after = self._skip, self._in_content
        elif self._tag:
            self._thoughts.append(self._held)
            self._held = self._tag = ""
            self._in_thoughts(char)
        elif char.isspace():
            self._held += char
        else:
            self._thoughts.append(self._held + char)
            self._held = ""

    def _in_content(self, char: str) -> None:
        self._content.append(char)


class MessageReader:
    """Reads the text of one choice: thoughts first, then content and calls; or demanded calls."""

    def __init__(
        self,
        parser: str | None,
        reasoning: str | None,
        *,
        thinks: bool = False,
        prompt: str = "",
        parallel: bool,
        demanded: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ):
        """`parser` and `reasoning` name formats, None: there are none of their kind.

        `thinks`: the prompt ends with the opening tag of thoughts; `prompt` is its text, where
        the format reads it. Without `parallel` the first call is the only one. With `demanded`
        the text is calls by a grammar: of the function of that name, or ("") of any. Some formats
        need the schemas of the `tools`.
        """
        self._demanded = None if demanded is None else ToolCallReader(demanded)
        self._is_one = bool(demanded)
        self._harmony = self._calls = self._thoughts = None
        if reasoning == HARMONY:
            self._harmony = HarmonyReader(prompt, with_calls=parser is not None)
        else:
            self._calls = None if parser is None else _call_parser(parser, tools)
            always = reasoning == ALWAYS_THOUGHTS
            self._thoughts = None if reasoning is None else ThoughtReader(thinks, always=always)
        self._has_thoughts = reasoning is not None
        readers = self._demanded, self._harmony, self._calls, self._thoughts
        # Whether a piece of the text is a piece of the content.
        self.is_plain = all(reader is None for reader in readers)
        self._parallel = parallel

    @property
    def calls(self) -> list[Any]:
        """The calls so far."""
        if self._demanded is not None:
            return self._demanded.calls
        reader = self._harmony or self._calls
        calls = [] if reader is None else reader.calls
        return calls if self._parallel else calls[:1]

    def feed(self, text: str, ends: bool) -> dict[str, Any]:
        """Return the delta of a message that a piece brings; `ends`: it is the last piece."""
        thoughts, content = "", text
        deltas: list[dict[str, Any]] = []
        if self._harmony is not None:
            thoughts, content, deltas = self._harmony.feed(text, ends)
        if self._thoughts is not None:
            thoughts, content = self._thoughts.feed(text, ends)
        if self._demanded is not None:
            deltas, content = joined(self._demanded.feed(content)), ""
            return _shown(thoughts, content, deltas)
        if self._calls is not None:
            content, deltas = self._calls.feed(content)
            if ends:
                content += self._calls.finish()
        deltas = [delta for delta in deltas if self._parallel or not delta["index"]]
        return _shown(thoughts, content, deltas)

    def whole(self, text: str, echo: str) -> dict[str, Any]:
        """Return the message of a whole text; `echo` comes before its content."""
        read = self.feed(text, ends=True)
        calls = [call.as_json() for call in self.calls]
        thoughts = {"reasoning_content": read.get("reasoning_content")}
        if self._demanded is not None:
            return {"content": None, "tool_calls": calls} | (thoughts if self._has_thoughts else {})
        content = echo + read.get("content", "")
        message: dict[str, Any] = {"content": content or None if calls else content}
        if self._has_thoughts:
            message |= thoughts
        return message | ({"tool_calls": calls} if calls else {})

    def finish(self, reason: FinishReason | None) -> str | None:
        """Return why a chat's choice ended; as vLLM has it, one demanded function just stops."""
        if reason is not FinishReason.STOP or self._is_one:
            return reason
        return "tool_calls" if self.calls else reason


def _call_parser(
    name: str, tools: Sequence[Mapping[str, Any]] | None
) -> AbstractCallParser | TaggedCallParser:
    return TaggedCallParser(tools) if name in TAGGED_CALLS else CALL_PARSERS[name]()


def _shown(thoughts: str, content: str, calls: list[Any]) -> dict[str, Any]:
    """Return the parts of a delta that are not empty."""
    parts = {"reasoning_content": thoughts, "content": content, "tool_calls": calls}
    return {name: part for name, part in parts.items() if part}


def reader_of(
    body: ChatBody, settings: HttpSettings, generation: Generation
) -> Callable[[], MessageReader]:
    """Return what makes a reader for each choice of a chat that is in the engine."""
    demanded, prompt = demanded_calls(body), generation.prompts[0].text or ""
    outputs, reasoning = generation.samplings[0].structured_outputs, settings.reasoning_parser
    is_closed = reasoning == ALWAYS_THOUGHTS and prompt.rstrip().endswith("</think>")
    if generation.by_head or is_closed or (outputs is not None and not outputs.thoughts):
        reasoning = None
    return functools.partial(
        MessageReader,
        auto_parser(body, settings.auto_call_parser),
        reasoning,
        thinks=prompt.rstrip().endswith("<think>"),
        prompt=prompt,
        parallel=body.parallel_tool_calls is not False,
        demanded=None if demanded is None else demanded.name,
        tools=body.tools,
    )
