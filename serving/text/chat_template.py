"""Chat messages to a prompt, by the model's own Jinja template in a bounded sandbox. No jax.

Templates come from the model folder or the operator, never from a request.
"""

import collections
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from serving.text.template_sandbox import BoundedEnvironment, Meter

MAX_TEMPLATE = 1 << 18  # characters
# What the server fills in; everything else a request may give its template.
OWN_VARIABLES = frozenset(
    (
        *("messages", "add_generation_prompt", "continue_final_message", "tools", "documents"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now"),
    )
)
_MAX_MESSAGE = 300
_PROBE = "a text to look for"


class ChatTemplate:
    """One compiled template; any thread may render it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """`special_tokens` are what the template calls bos_token, eos_token and so on."""
        if len(source) > MAX_TEMPLATE:
            raise ValueError(
                f"The chat template has {len(source)} characters; at most {MAX_TEMPLATE} are read."
            )
        self._special_tokens = dict(special_tokens)
        self._wants_parts = False
        # An environment takes half of a short prompt's rendering to make, so each serves many.
        self._idle: collections.deque[jinja2.Template] = collections.deque()
        try:
            self._code = _environment(Meter()).compile_source(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"The chat template is not valid: {error}"[:_MAX_MESSAGE]) from error
        self._wants_parts = not self._shows(_PROBE) and self._shows(_part(_PROBE))

    def _shows(self, content: Any) -> bool:
        """Return whether the template shows such a content of a user's message."""
        try:
            return _PROBE in self.render([{"role": "user", "content": content}])
        except ValueError:
            return False

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        meter: Meter | None = None,
    ) -> str:
        """Return the prompt of the messages; with `continue_final_message` up to the last text.

        A message has a `role`, and `content` that is a text, a list of parts {"type": "text",
        "text": ...} or {"type": "image"}, or None. A template gets a text, or, where there is an
        image or it shows no text otherwise, parts. ValueError when the template refuses them,
        fails, or exceeds the meter.
        """
        template = self._idle_template() if meter is None else self._template(meter)
        plain = [_plain(index, message) for index, message in enumerate(messages)]
        if self._wants_parts:
            plain = [{**m, "content": _part(m["content"])} for m in plain]
        fixed = {"messages": plain, "add_generation_prompt": add_generation_prompt}
        fixed |= {name: (variables or {}).get(name) for name in ("tools", "documents")}
        fixed |= self._special_tokens
        try:
            prompt = template.render({**(variables or {}), **fixed})
        except _Refused as error:
            raise ValueError(f"The chat template refuses the messages: {error}") from error
        except (Exception, RecursionError) as error:  # whatever a template can do wrong
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"The chat template failed: {what}"[:_MAX_MESSAGE]) from error
        if meter is None:  # after a failure the template is not used again
            self._idle.append(template)
        return (
            _up_to(prompt, _text_of(plain[-1]["content"]) if plain else "")
            if continue_final_message
            else prompt
        )

    def _idle_template(self) -> jinja2.Template:
        """Return the template in an environment that no thread renders in, its budget whole."""
        try:
            template = self._idle.pop()
        except IndexError:
            return self._template(Meter())
        environment = template.environment
        assert isinstance(environment, BoundedEnvironment)
        environment.meter.restart()
        return template

    def _template(self, meter: Meter) -> jinja2.Template:
        """Return the template in an environment of its own."""
        environment = _environment(meter)
        return jinja2.Template.from_code(environment, self._code, environment.globals)


def _part(content: Any) -> list[dict[str, Any]]:
    """Return a content as parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text_of(content: Any) -> str:
    """Return a content's last text."""
    texts = [part["text"] for part in _part(content) if part["type"] == "text"]
    return texts[-1] if texts else ""


def _up_to(prompt: str, text: str) -> str:
    """Return the prompt up to the end of its last message's text."""
    if not text.strip():
        raise ValueError("continue_final_message needs a last message with text.")
    for shown in (text, text.strip()):
        start = prompt.rfind(shown)
        if start >= 0:
            return prompt[: start + len(shown)]
    raise ValueError("continue_final_message: the chat template does not show the last message.")


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _environment(meter: Meter) -> BoundedEnvironment:
    """Return a sandbox with what templates written for transformers expect."""
    environment = BoundedEnvironment(meter)
    environment.filters["tojson"] = functools.partial(_tojson, meter)
    environment.globals["raise_exception"] = functools.partial(_raise_exception, meter)
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(meter: Meter, message: str) -> str:
    raise _Refused(str(meter.shown(message))[:_MAX_MESSAGE])


def _strftime_now(layout: str) -> str:
    if len(layout) > 100:
        raise SecurityError("the layout of a date is too long")
    return datetime.datetime.now().strftime(layout)


def _tojson(
    meter: Meter,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes that jinja2's own filter adds for HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError("the indent of JSON must be in [0, 16]")
    return json.dumps(
        meter.shown(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _plain(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message whose content is a text, or parts if one is an image."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"messages.{index}.role must be a text.")
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        images = [part for part in content if isinstance(part, Mapping) and _is_image(part)]
        if images:
            plain = [
                part if part in images else _part(_part_text(index, part))[0] for part in content
            ]
            return {**message, "content": plain}
        content = "\n".join(_part_text(index, part) for part in content)
    return {**message, "content": content}


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image"


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise ValueError(f"messages.{index}: a part of type {str(kind)[:64]!r} is not supported.")
    return text
