"""Conversations of Python callers as prompts: rendered, with the images of their parts. No jax."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from serving.engine.images.front import TEXT_ONLY, ImageFront
from serving.engine.inputs.generate_arguments import Adapter, Adapters, Prompt, broadcast
from serving.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]
Messages = Conversation | Sequence[Conversation]
_CHAT_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
)
# Of `generate`, which a chat passes on.
GENERATE_OPTIONS = ("sampling_params", "lora_request", "use_tqdm", "images", "session")
ASYNC_OPTIONS = ("adapter", "sampling_params", "lora_request", "images", "session")


def taken_options(
    options: dict[str, Any],
    caller: str = "Engine.chat",
    further: Sequence[str] = GENERATE_OPTIONS,
) -> dict[str, Any]:
    """Take those of `chat_prompts` out of a chat's options and return them.

    TypeError names one that is neither of these nor one of `further`, which stay.
    """
    known = (*_CHAT_OPTIONS, *further)
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise TypeError(f"{caller} has no option {unknown!r}; there are {', '.join(known)}.")
    return {name: options.pop(name) for name in _CHAT_OPTIONS if name in options}


def chat_prompts(
    tokenizer_of: Callable[[Adapter], Tokenizer],
    front: ImageFront | None,
    messages: Messages,
    adapter: Adapters = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[Prompt]:
    """Return the prompt of each conversation, for `Engine.generate`, by its adapter's tokenizer.

    `front` is None where the model takes text only. The template gets `tools` and
    `chat_template_kwargs`. Raises ValueError for messages that the template refuses, text that
    spells the image placeholder, and parts that are not understood, TypeError for other types.
    """
    listed = _listed("messages", messages)
    variables = {**(chat_template_kwargs or {}), **({"tools": list(tools)} if tools else {})}
    if not listed:
        raise ValueError("messages must not be empty.")
    is_one = isinstance(listed[0], Mapping)
    if not is_one:
        listed = [_listed("A conversation", one, "a list of messages") for one in listed]
    conversations = [listed] if is_one else listed
    prompts: list[Prompt] = []
    names = broadcast("adapter", adapter, len(conversations), (str, Mapping, type(None)))
    for name, conversation in zip(names, conversations, strict=True):
        tokenizer = tokenizer_of(name)
        images: list[Any] = []
        plain = [_plain(n, message, images, front) for n, message in enumerate(conversation)]
        text = tokenizer.apply_chat_template(
            plain,
            add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        ids = tokenizer.encode(text, add_special_tokens=False)  # templates write their own
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": images}})
    return prompts


def _listed(name: str, value: Any, want: str = "a list of messages, or a list of those") -> list:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {want}, got {type(value).__name__}.")
    return list(value)


def _plain(index: int, message: Any, images: list[Any], front: ImageFront | None) -> dict[str, Any]:
    """Return a message for the template, its images appended to `images`."""
    if not isinstance(message, Mapping):
        raise TypeError(f"messages.{index} must be a dict, got {type(message).__name__}.")
    content = message.get("content")
    if isinstance(content, str) or content is None:
        _check_text(index, content or "", front)
        return dict(message)
    parts: list[dict[str, Any]] = []
    for part in _listed(f"messages.{index}.content", content, "a text or a list of parts"):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image" and part.get("image") is not None:
            if front is None:
                raise ValueError(TEXT_ONLY)
            images.append(part["image"])
            parts.append({"type": "image"})
        elif kind == "text" and isinstance(part.get("text"), str):
            _check_text(index, part["text"], front)
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise ValueError(
                f'messages.{index}: a part is {{"type": "text", "text": ...}} or '
                f'{{"type": "image", "image": ...}}, got type {str(kind)[:64]!r}.'
            )
    return {**message, "content": parts}


def _check_text(index: int, text: str, front: ImageFront | None) -> None:
    if front is not None and front.placeholder in text:
        raise ValueError(
            f"messages.{index}: the text holds {front.placeholder!r}, which stands for an image."
        )
