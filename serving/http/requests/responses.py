"""OpenAI's Responses body as the chat that it stands for; what is not served is refused by name."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from serving.http.errors import ApiError, from_validation
from serving.http.requests.protocol import ChatBody, ResponsesBody

LOGPROBS = "message.output_text.logprobs"  # of `include`
_SYSTEM = ("system", "developer")
_ROLES = ("user", "assistant", *_SYSTEM)
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# The body's own words of fields that a chat has by other names.
_OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
_ELSEWHERE = {
    **{chat: own for chat, own in _OWN_NAMES.items() if chat != "response_format"},
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "logprobs": f"include: [{LOGPROBS!r}]",
    "n": "several requests",
}
_NOT_KEPT = "no response is kept; "
# Fields of the API that need what this server does not have: values that ask for nothing, and what
# to send in place of others.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), f"{_NOT_KEPT}send the whole conversation as input"),
    "conversation": ((), f"{_NOT_KEPT}send the whole conversation as input"),
    "prompt": ((), "no prompts are kept; send the text as instructions or input"),
    "store": ((False,), f"{_NOT_KEPT}leave it out or send false"),
    "background": ((False,), f"{_NOT_KEPT}leave it out, and read the answer or its stream"),
    "truncation": (("disabled",), "an input that is too long is refused; leave items out of it"),
    "context_management": (([],), f"{_NOT_KEPT}send the input that the model should read"),
    "moderation": ((), "the server has no moderation; leave it out"),
}
_PASSED = ("model", "temperature", "top_p", "parallel_tool_calls", "stream")
_WORD = re.compile(
    r"\b(messages(?:\.\d+)?|max_completion_tokens|response_format(?:\.json_schema)?)\b"
)


def chat_of(body: ResponsesBody, context: int) -> ChatBody:
    """Return the chat that a body stands for; ApiError 400 names what is not served.

    `context` bounds the items of the input: each has a token at least.
    """
    _refuse(body)
    if len(body.input) > context and isinstance(body.input, list):
        raise _error("input", f"has {len(body.input)} items; the context has {context} tokens")
    logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not logprobs:
        raise _error("top_logprobs", f"needs {LOGPROBS!r} in include")
    reasoning = body.reasoning.effort if body.reasoning else None
    fields = {name: getattr(body, name) for name in _PASSED} | {
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": reasoning,
        "response_format": _response_format(body),
        "tools": [_tool(n, tool) for n, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs if logprobs else None,
    }
    try:
        return ChatBody.model_validate((body.model_extra or {}) | fields)
    except ValidationError as error:
        raise from_validation(error) from None


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Let errors of the chat that stands for a body use the body's names of fields."""
    try:
        yield
    except ApiError as error:
        message = _WORD.sub(_own_word, error.message).replace(".function.", ".")
        param = _OWN_NAMES.get(error.param or "", error.param)
        more = {"type": error.type, "headers": error.headers}
        raise ApiError(error.status, message, param=param, **more) from None


def _own_word(match: re.Match[str]) -> str:
    word = match[1].partition(".")[0]
    return "text.format" if word == "response_format" else _OWN_NAMES[word]


def _error(param: str, text: str) -> ApiError:
    return ApiError(400, f"{param} {text}.", param=param.partition(".")[0])


def _refuse(body: ResponsesBody) -> None:
    """Raise for fields that ask for what is not served."""
    extra = body.model_extra or {}
    for name, (harmless, instead) in _REFUSED.items():
        value = getattr(body, name, None)
        if value is not None and not any(type(h) is type(value) and h == value for h in harmless):
            raise _error(name, f"is not supported: {instead}")
    for name, replacement in _ELSEWHERE.items():
        if extra.get(name) is not None:
            raise _error(name, f"is not a field of responses; use {replacement}")
    if body.max_output_tokens == 0:
        raise _error("max_output_tokens", "must be at least 1, got 0")
    for name in body.include or ():
        if name != LOGPROBS:
            raise _error("include", f"has {name[:64]!r}; only {LOGPROBS!r} is supported")
    if body.reasoning and body.reasoning.summary not in (None, "auto"):
        raise _error("reasoning.summary", "is not supported; thoughts come as they are")
    if body.text and body.text.verbosity not in (None, "medium"):
        raise _error("text.verbosity", "is not supported")


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return instructions and input as the messages of a chat.

    Those for the system at the beginning become one message: many templates take no more.
    """
    given = body.input
    if given == []:
        raise _error("input", "must not be empty")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    system: list[str | list[Any]] = [] if body.instructions is None else [body.instructions]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if not messages and _is_for_system(item):
            system.append(_content(f"input.{index}", item.get("content")))
        else:
            _add_item(messages, f"input.{index}", item)
    return [{"role": "system", "content": _joined(system)}, *messages] if system else messages


def _is_for_system(item: Mapping[str, Any]) -> bool:
    return item.get("type", "message") == "message" and item.get("role") in _SYSTEM


def _add_item(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Add one item of the input; earlier thoughts are left out, as templates do."""
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, where, item)
    elif kind == "function_call":
        _add_call(messages, where, item)
    elif kind == "function_call_output":
        call_id = _text(where, item, "call_id")
        content = _content(where, item.get("output"))
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind != "reasoning":
        raise _error(
            where,
            f"has the type {str(kind)[:64]!r}; supported are message, function_call, "
            "function_call_output and reasoning",
        )


def _add_message(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    role, content = item.get("role"), _content(where, item.get("content"))
    if role not in _ROLES:
        raise _error(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    messages.append({"role": "system" if role in _SYSTEM else role, "content": content})


def _joined(contents: list[str | list[Any]]) -> str | list[Any]:
    """Return contents as one, at once: a request may have very many of them."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(texts)
    return [part for content in contents for part in _parts(content)]


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _add_call(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Add a call to the assistant's message before it, or in a message of its own."""
    function = {name: _text(where, item, name) for name in ("name", "arguments")}
    call = {"id": _text(where, item, "call_id"), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _error(f"{where}.{name}", "must be a text")
    return value


def _content(where: str, given: Any) -> str | list[dict[str, Any]]:
    """Return a content as that of a chat's message."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _error(where, "must have a text or a list of parts")
    return [_part(where, part) for part in given]


def _part(where: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = _TEXTS.get(kind) if isinstance(kind, str) else None
    if field is not None:
        return {"type": "text", "text": _text(where, part, field)}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise _error(
        where,
        f"has a part of type {str(kind)[:64]!r}; supported are input_text, output_text, and "
        "input_image with an image_url",
    )


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    """Return text.format in the form of chats, which have the schema one level deeper."""
    given = body.text.format if body.text else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chats; only functions are served."""
    kind = tool.get("type")
    if kind != "function":
        raise _error(f"tools.{index}", f"has the type {str(kind)[:64]!r}; only function is served")
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(given, Mapping):
        return given
    kind = given.get("type")
    if kind != "function":
        raise _error("tool_choice", f"has the type {str(kind)[:64]!r}; only function is served")
    return {"type": "function", "function": {"name": given.get("name")}}
