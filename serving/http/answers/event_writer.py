"""Events of one stream as bytes: chunks that differ in their text alone are encoded once.

A stream of tokens is many chunks of the same few lines of JSON around a word. To encode each of
them whole takes the event loop several times as long as everything else that it does for a token.
"""

import secrets
from typing import Any

from serving.http.answers.json_pieces import dumps

# What the choice of such a chunk has beside its text.
_PLAIN = {"index", "logprobs", "finish_reason", "stop_reason"}
_MARK = secrets.token_hex(16)  # stands for the text
_COMPLETION, _CHAT = _PLAIN | {"text"}, _PLAIN | {"delta"}


def event(data: dict[str, Any]) -> bytes:
    """Return one event as it goes over the wire."""
    return b"data: %b\n\n" % dumps(data)


class EventWriter:
    """Writes the chunks of one stream; what stands around their choices never changes."""

    def __init__(self) -> None:
        # What comes before and after the text, by choice: of completions and of chats.
        self._texts: dict[int, tuple[bytes, bytes] | None] = {}
        self._contents: dict[int, tuple[bytes, bytes] | None] = {}

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Return what `event` does."""
        choices = chunk.get("choices")
        if choices is None or len(choices) != 1 or "usage" in chunk:
            return event(chunk)
        choice = choices[0]
        holder, field = _text_of(choice)
        if holder is None:
            return event(chunk)
        known, index = self._texts if field == "text" else self._contents, choice["index"]
        if index not in known:
            known[index] = _split(chunk, holder, field)
        around = known[index]
        return event(chunk) if around is None else dumps(holder[field]).join(around)

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """Return what stands around a choice's text in chunks of nothing else.

        None before the first one.
        """
        return self._texts.get(index) or self._contents.get(index)


def _text_of(choice: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return what holds the text of a choice that has nothing else to say, and under which name."""
    for name in ("logprobs", "finish_reason", "stop_reason"):
        if choice.get(name) is not None:
            return None, ""
    keys = choice.keys()
    if keys == _COMPLETION:
        return choice, "text"
    delta = choice.get("delta")
    if keys == _CHAT and isinstance(delta, dict) and delta.keys() == {"content"}:
        return (delta, "content") if isinstance(delta["content"], str) else (None, "")
    return None, ""


def _split(chunk: dict[str, Any], holder: dict[str, Any], field: str) -> tuple[bytes, bytes] | None:
    """Return what comes before and after the text; None where that cannot be told."""
    text = holder[field]
    holder[field] = _MARK
    parts = event(chunk).split(dumps(_MARK))
    holder[field] = text
    return (parts[0], parts[1]) if len(parts) == 2 else None
