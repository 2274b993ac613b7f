"""Output items of a response as they grow, and the events that tell of it, in OpenAI's order."""

import secrets
from typing import Any

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
Event = dict[str, Any]


class ResponseItems:
    """Items of one answer: thoughts, messages and calls, one after the other.

    The events of an item: it is added (and a part in it), pieces of its text, the whole text, (the
    part is done,) it is done.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item while it grows
        self._call = -1  # its place among the calls
        self._text: list[str] = []  # of the open item
        self._logprobs: list[Any] = []  # of a message

    def take(self, delta: dict[str, Any], logprobs: list[Any]) -> list[Event]:
        """Return the events of a message's delta, and of its tokens' log-probabilities."""
        events: list[Event] = []
        if thoughts := delta.get("reasoning_content"):
            events += self._grow("reasoning", thoughts, [])
        if content := delta.get("content"):
            events += self._grow("message", content, logprobs)
        for call in delta.get("tool_calls", ()):
            events += self._grow_call(call)
        return events

    def close(self, *, is_complete: bool = True) -> list[Event]:
        """Return the events that end the open item, which may lack its end."""
        item, self._open = self._open, None
        if item is None:
            return []
        text, self._text = "".join(self._text), []
        item["status"] = "completed" if is_complete else "incomplete"
        at = self._at(item)
        if item["type"] == "function_call":
            item["arguments"] = text
            fields = {"arguments": text, "name": item["name"]}
            events = [{"type": "response.function_call_arguments.done", **at, **fields}]
        else:
            part, kind = item["content"][0], _PARTS[item["type"]]
            part["text"] = text
            at |= {"content_index": 0}
            fields = {"text": text}
            if kind == "output_text":
                part["logprobs"], self._logprobs = self._logprobs, []
                fields |= {"logprobs": part["logprobs"]}
            events = [
                {"type": f"response.{kind}.done", **at, **fields},
                {"type": "response.content_part.done", **at, "part": part},
            ]
        return [*events, self._told("done", item)]

    def end(self, *, is_complete: bool) -> list[Event]:
        """Return the last events; an answer without text is an empty message."""
        events = [] if self.output else self._begin_text("message")
        return events + self.close(is_complete=is_complete)

    def _grow(self, kind: str, text: str, logprobs: list[Any]) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            events = self.close() + self._begin_text(kind)
        self._text.append(text)
        item = self.output[-1]
        event = {"type": f"response.{_PARTS[kind]}.delta", **self._at(item), "content_index": 0}
        event |= {"delta": text}
        if kind == "message":
            self._logprobs += logprobs
            event |= {"logprobs": logprobs}
        return [*events, event]

    def _grow_call(self, delta: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._call != delta["index"]:
            self._call = delta["index"]
            call = {"call_id": delta["id"], "name": delta["function"]["name"], "arguments": ""}
            events = self.close() + self._begin("function_call", "fc", call)
        arguments = delta["function"].get("arguments", "")
        if not arguments:
            return events
        self._text.append(arguments)
        event = {"type": "response.function_call_arguments.delta", **self._at(self.output[-1])}
        return [*events, {**event, "delta": arguments}]

    def _begin_text(self, kind: str) -> list[Event]:
        part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
            begun = self._begin(kind, "msg", {"role": "assistant", "content": []})
        else:
            begun = self._begin(kind, "rs", {"summary": [], "content": []})
        item = self.output[-1]
        event = {"type": "response.content_part.added", **self._at(item), "content_index": 0}
        item["content"] = [part]
        return [*begun, {**event, "part": dict(part)}]

    def _begin(self, kind: str, prefix: str, fields: dict[str, Any]) -> list[Event]:
        name = f"{prefix}_{secrets.token_hex(16)}"
        self._open = {"type": kind, "id": name, "status": "in_progress", **fields}
        self.output.append(self._open)
        if kind != "function_call":
            self._call = -1
        return [self._told("added", dict(self._open))]

    def _told(self, what: str, item: dict[str, Any]) -> Event:
        index = len(self.output) - 1
        return {"type": f"response.output_item.{what}", "output_index": index, "item": item}

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.output) - 1}
