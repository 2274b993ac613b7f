"""Prompts as lists of token ids, whatever form they came in."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serving.api.images import PlacedImages, PreparedImage
from serving.http.errors import ApiError
from serving.http.interface import AbstractEngine
from serving.http.lanes import Lane, run_in
from serving.http.requests.bounds import Bounds
from serving.http.requests.images import is_text, not_taken, parts_of
from serving.http.requests.protocol import MAX_PROMPTS, ChatMessage
from serving.http.requests.template_options import TemplateOptions
from serving.http.requests.tools import template_calls
from serving.http.requests.truncation import Truncation

_SHORT = 2048  # characters that are encoded without leaving the event loop
_LONG = 1 << 15  # characters that a thread for short work encodes
_MAX_ALL_TOKENS = 1 << 20  # of all prompts of a request together


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, its text where it came as text, its images."""

    ids: list[int]
    text: str | None
    images: PlacedImages = ()


async def read_prompts(
    engine: AbstractEngine,
    given: Any,
    add_special_tokens: bool,
    field: str = "prompt",
    truncation: Truncation | None = None,
) -> list[Prompt]:
    """Return the prompts of a str, [str], [int] or [[int]]; otherwise raise ApiError 400.

    "" is a prompt where the tokenizer puts a begin token in front. A prompt that `truncation` cuts
    may have up to `Bounds.tokens` tokens before, and has no text.
    """
    if given is None or given == []:
        raise ApiError(400, f"{field} must not be empty.", param=field)
    items: list[Any] = given if isinstance(given, list) else [given]
    if isinstance(items[0], int):
        items = [items]
    if len(items) > MAX_PROMPTS:
        raise ApiError(
            400, f"{field} must have at most {MAX_PROMPTS} entries, got {len(items)}.", param=field
        )
    bounds = Bounds.of(engine)
    prompts, room = [], max(_MAX_ALL_TOKENS, bounds.context)
    most = bounds.context if truncation is None else bounds.tokens
    for group in _groups(items):
        for item, given_ids in zip(
            group, await _ids(engine, group, add_special_tokens, field, most), strict=True
        ):
            if not given_ids:
                raise ApiError(400, f"{field} must not be empty.", param=field)
            check_ids(engine, given_ids, field, most)
            text = item if isinstance(item, str) else None
            ids = _cut(engine, given_ids, truncation, add_special_tokens and text is not None)
            prompts.append(Prompt(ids, text if len(ids) == len(given_ids) else None))
            room -= len(given_ids)
        if room < 0:
            raise ApiError(
                400, f"{field} has more than {_MAX_ALL_TOKENS} tokens in all.", param=field
            )
    return prompts


def _cut(
    engine: AbstractEngine, ids: list[int], truncation: Truncation | None, has_begin: bool
) -> list[int]:
    """Return the tokens that stay; `has_begin`: the tokenizer may have put some in front."""
    if truncation is None or len(ids) <= truncation.most:
        return ids
    begin = engine.tokenizer.encode("", add_special_tokens=True) if has_begin else []
    return truncation.cut(ids, begin)


def _groups(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the prompts in order, short texts that follow each other together."""
    group, size = [], 0
    for item in items:
        length = len(item) if isinstance(item, str) else 0
        if group and size + length > _LONG:
            yield group
            group, size = [], 0
        group.append(item)
        size += length
    yield group


async def _ids(
    engine: AbstractEngine, group: list[Any], add_special_tokens: bool, field: str, most: int
) -> list[list[int]]:
    """Return the tokens of one of the groups."""
    if len(group) == 1:
        item = group[0]
        text = isinstance(item, str)
        return [await encode(engine, item, add_special_tokens, most, field) if text else item]
    return await run_in(
        Lane.SHORT,
        lambda: [
            engine.tokenizer.encode(item, add_special_tokens=add_special_tokens)
            if isinstance(item, str)
            else item
            for item in group
        ],
    )


async def encode(
    engine: AbstractEngine,
    text: str,
    add_special_tokens: bool,
    most: int | None = None,
    field: str = "prompt",
) -> list[int]:
    """Return the tokens of a text; a long one is encoded in a thread.

    `most` tokens (by default the context) are the bound. ApiError 400 for a text that must have
    more, by its characters or by its beginning; others may be returned with more.
    """
    bounds = Bounds.of(engine)
    most = bounds.context if most is None else most
    if len(text) > bounds.characters(most):
        raise _too_long(bounds, f"at least {-(-len(text) // bounds.longest_token)}", most, field)
    tokenizer = engine.tokenizer
    if len(text) <= _SHORT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    for size in _beginnings(len(text), 4 * most):
        ids = await _encode_aside(engine, text[:size], False)
        # What follows may change some tokens at the end, but never as many as these.
        if len(ids) > 2 * most + 64:
            raise _too_long(bounds, f"at least {len(ids) // 2}", most, field)
    return await _encode_aside(engine, text, add_special_tokens)


async def _encode_aside(engine: AbstractEngine, text: str, add_special_tokens: bool) -> list[int]:
    lane = Lane.SHORT if len(text) <= _LONG else Lane.LONG
    return await run_in(lane, engine.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _beginnings(length: int, first: int) -> Iterator[int]:
    """Yield lengths of beginnings of a text that are worth a look before the whole of it."""
    size = max(first, _LONG)
    while 2 * size < length:
        yield size
        size *= 4


def _too_long(bounds: Bounds, length: str, most: int, field: str) -> ApiError:
    """Return the answer to a prompt with more than `most` tokens."""
    bound = f"model's maximum context length ({most})"
    if most > bounds.context:  # of what is cut, and of routes that compute nothing
        bound = f"the {most} tokens that one input may have here"
    return ApiError(400, f"Input length ({length}) exceeds {bound}.", param=field)


def check_ids(engine: AbstractEngine, ids: list[int], field: str, most: int | None = None) -> None:
    """Raise ApiError 400 for too many token ids, or for one outside of the vocabulary.

    `most` ids (by default the context) are the bound.
    """
    bounds = Bounds.of(engine)
    limit = bounds.context if most is None else most
    if len(ids) > limit:
        raise _too_long(bounds, str(len(ids)), limit, field)
    size = engine.model_info.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise ApiError(400, f"{field} has a token id outside of [0, {size - 1}].", param=field)


async def chat_prompt(
    engine: AbstractEngine,
    messages: list[ChatMessage],
    options: TemplateOptions,
    add_special_tokens: bool,
    most: int | None = None,
    images: Sequence[PreparedImage] = (),
    truncation: Truncation | None = None,
) -> Prompt:
    """Return the prompt that the server's own template makes of the messages and their images.

    `most` tokens (by default the context) are the bound of `encode`. `truncation` cuts a prompt
    without images, which may have up to `Bounds.tokens` tokens before.
    """
    if not messages:
        raise ApiError(400, "messages must not be empty.", param="messages")
    bounds = Bounds.of(engine)
    if most is None:
        most = bounds.context if truncation is None else bounds.tokens
    if len(messages) > most:  # each has a token at least
        raise _too_long(bounds, f"at least {len(messages)}", most, "messages")
    text = await run_in(Lane.SHORT, _render, engine, messages, options)
    ids = await encode(engine, text, add_special_tokens, most, "messages")
    if not ids:
        raise ApiError(400, "messages must not be empty.", param="messages")
    if truncation is not None and len(ids) > truncation.most:
        if images:
            raise ApiError(
                400,
                "truncate_prompt_tokens cuts no prompt with images; send fewer messages.",
                param="truncate_prompt_tokens",
            )
        ids = truncation.cut(ids, [])
        text = engine.tokenizer.decode(ids, skip_special_tokens=False)
    if engine.images is None:
        return Prompt(ids, text)
    try:
        ids, starts = engine.images.expand(ids, images)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None
    return Prompt(ids, text, tuple(zip(images, starts, strict=True)))


def plain_messages(engine: AbstractEngine, messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return role and text of each message, or its parts where there are images.

    What the model does not take is ApiError 400.
    """
    return [_plain(engine, i, message) for i, message in enumerate(messages)]


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message as `plain_messages` gives it."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _render(engine: AbstractEngine, messages: list[ChatMessage], options: TemplateOptions) -> str:
    plain = plain_messages(engine, messages)
    return engine.tokenizer.apply_chat_template(plain, **options.as_arguments())


def _plain(engine: AbstractEngine, index: int, message: ChatMessage) -> dict[str, Any]:
    """Return role, content and tool calls of a message; what is not taken is refused by name."""
    extra = message.model_extra or {}
    more: dict[str, Any] = {}
    if extra.get("tool_calls"):
        more["tool_calls"] = template_calls(index, extra["tool_calls"])
    more |= {k: v for k in ("tool_call_id", "name") if isinstance(v := extra.get(k), str)}
    if message.role == "assistant":
        more |= _thoughts(extra)
    return {**_content(engine, index, message), **more}


def _thoughts(extra: Mapping[str, Any]) -> dict[str, str]:
    """Return an earlier answer's thoughts, under both names that templates read."""
    names = ("reasoning", "reasoning_content")
    text = next((v for name in names if isinstance(v := extra.get(name), str) and v), None)
    return {} if text is None else dict.fromkeys(names, text)


def _content(engine: AbstractEngine, index: int, message: ChatMessage) -> dict[str, Any]:
    """Return role and content of a message."""
    extra = message.model_extra or {}
    for field in ("function_call", "audio"):
        if extra.get(field):
            raise ApiError(400, f"messages.{index}.{field} is not supported.", param="messages")
    content = message.content
    if engine.images is not None:
        parts = parts_of(engine.images, index, message)
        if any(part["type"] == "image" for part in parts):
            return {"role": message.role, "content": parts}
    if content is None or isinstance(content, str):
        return {"role": message.role, "content": content or ""}
    for part in content:
        if not is_text(part):
            raise not_taken(index, part, ("text",))
    return {"role": message.role, "content": "\n".join(part.text or "" for part in content)}
