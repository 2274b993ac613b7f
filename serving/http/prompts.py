"""Prompts as lists of token ids, whatever form they came in."""

import asyncio
import dataclasses
from typing import Any

from serving.http.errors import ApiError
from serving.http.interface import AbstractEngine
from serving.http.protocol import MAX_PROMPTS, ChatMessage
from serving.http.template_options import TemplateOptions

_SHORT = 2048  # characters that are encoded without leaving the event loop


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and its text where it came as text."""

    ids: list[int]
    text: str | None


async def read_prompts(
    engine: AbstractEngine, given: Any, add_special_tokens: bool, field: str = "prompt"
) -> list[Prompt]:
    """Return the prompts of a str, [str], [int] or [[int]]; otherwise raise ApiError 400.

    "" is a prompt where the tokenizer puts a begin token in front.
    """
    if given is None or given == []:
        raise ApiError(400, f"{field} must not be empty.", param=field)
    items: list[Any] = given if isinstance(given, list) else [given]
    if isinstance(items[0], int):
        items = [items]
    if len(items) > MAX_PROMPTS:
        raise ApiError(400, f"{field} has {len(items)} entries of {MAX_PROMPTS}.", param=field)
    prompts = []
    for item in items:
        if isinstance(item, str):
            prompt = Prompt(await encode(engine, item, add_special_tokens), item)
        else:
            prompt = Prompt(item, None)
        if not prompt.ids:
            raise ApiError(400, f"{field} must not be empty.", param=field)
        check_ids(engine, prompt.ids, field)
        prompts.append(prompt)
    return prompts


async def encode(engine: AbstractEngine, text: str, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text; a long one is encoded in a thread."""
    if len(text) <= _SHORT:
        return engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(
        engine.tokenizer.encode, text, add_special_tokens=add_special_tokens
    )


def check_ids(engine: AbstractEngine, ids: list[int], field: str) -> None:
    """Raise ApiError 400 for a token id outside of the vocabulary."""
    size = engine.model_info.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise ApiError(400, f"{field} has a token id outside of [0, {size - 1}].", param=field)


async def chat_prompt(
    engine: AbstractEngine,
    messages: list[ChatMessage],
    options: TemplateOptions,
    add_special_tokens: bool,
) -> Prompt:
    """Return the prompt that the server's own template makes of the messages."""
    if not messages:
        raise ApiError(400, "messages must not be empty.", param="messages")
    plain = plain_messages(messages)
    text = await asyncio.to_thread(
        engine.tokenizer.apply_chat_template, plain, **options.as_arguments()
    )
    ids = await encode(engine, text, add_special_tokens)
    if not ids:
        raise ApiError(400, "messages must not be empty.", param="messages")
    return Prompt(ids, text)


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """Return role and text of each message; what is not text is ApiError 400."""
    return [_plain(i, message) for i, message in enumerate(messages)]


def _plain(place: int, message: ChatMessage) -> dict[str, str]:
    """Return role and text of a message; a part that is not text is refused by its type."""
    extra = message.model_extra or {}
    for field in ("tool_calls", "function_call", "audio"):
        if extra.get(field):
            raise ApiError(400, f"messages.{place}.{field} is not supported.", param="messages")
    content = message.content
    if content is None or isinstance(content, str):
        return {"role": message.role, "content": content or ""}
    texts = []
    for part in content:
        kind = part.type or (
            "text" if part.text is not None else next(iter(part.model_extra or {}), "none")
        )
        if kind != "text" or part.text is None:
            raise ApiError(
                400,
                f"messages.{place}: a part of type {kind[:64]!r} is not supported; this model "
                "takes text only.",
                param="messages",
            )
        texts.append(part.text)
    return {"role": message.role, "content": "\n".join(texts)}
