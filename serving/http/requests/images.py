"""Images of messages: content parts to prepared images, in order, within bounds of a request."""

from collections.abc import Iterator
from typing import Any

from serving.api.images import PreparedImage
from serving.engine.images.decode import MAX_PIXELS, ImageError
from serving.engine.images.front import TOO_MANY, ImageFront
from serving.engine.images.sources import FetchFailed, MediaPolicy, read_source
from serving.http.errors import ApiError
from serving.http.interface import AbstractEngine
from serving.http.lanes import Lane, run_in
from serving.http.requests.protocol import ChatMessage, ContentPart, ImageUrl

MAX_HELD_BYTES = 2 << 30  # of the prepared images of all requests
MAX_ALL_PIXELS = 4 * MAX_PIXELS  # of all images of a request, decoded one after the other
_REMOTE = ("http:", "https:")


def image_url(part: ContentPart) -> str | None:
    """Return the URL of a part that is an image; None for another part."""
    if part.image_url is None or part.type not in (None, "image_url"):
        return None
    given = part.image_url
    return given.url if isinstance(given, ImageUrl) else given


def is_text(part: ContentPart) -> bool:
    """Return whether a part is text and nothing else."""
    return part.text is not None and part.type in (None, "text") and part.image_url is None


def part_kind(part: ContentPart) -> str:
    """Return what to call a part that is not understood."""
    if part.type:
        return part.type
    if part.text is not None:
        return "text"
    return "image_url" if part.image_url else next(iter(part.model_extra or {}), "none")


def urls_of(messages: list[ChatMessage]) -> Iterator[str]:
    """Yield the URLs of all images, in order."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if (url := image_url(part)) is not None:
                yield url


async def read_images(
    engine: AbstractEngine, messages: list[ChatMessage], policy: MediaPolicy, salt: str
) -> list[PreparedImage]:
    """Return the images of the messages, prepared. ApiError 400, or 422 for a failed fetch.

    QueueFull while the images of other requests fill MAX_HELD_BYTES. `salt` is that of the
    request's caches.

    They are fetched and decoded one after the other in threads for that, so that a request takes
    no more than one of them and the memory of one image at a time.
    """
    front: ImageFront | None = engine.images
    if front is None:
        return []  # parts are refused by name where messages are read
    urls = list(urls_of(messages))
    if len(urls) > front.max_images:
        raise _wrong(TOO_MANY.format(limit=front.max_images))
    images, pixels, tokens = [], 0, 0
    for number, url in enumerate(urls, 1):
        which = f"Image {number} of {len(urls)}: " if len(urls) > 1 else ""
        try:
            if url[:6].lower().startswith(_REMOTE):
                data = await run_in(Lane.FETCH, read_source, url, policy)
                image = await run_in(Lane.IMAGES, _prepared, front, data, salt)
            else:
                image = await run_in(Lane.IMAGES, _read, front, url, policy, salt)
        except FetchFailed as error:
            raise ApiError(422, f"{which}{error}", param="messages") from None
        except ImageError as error:
            raise _wrong(f"{which}{error}") from None
        pixels, tokens = pixels + image.num_pixels, tokens + image.num_tokens
        if pixels > MAX_ALL_PIXELS:
            raise _wrong(f"The images have more than {MAX_ALL_PIXELS} pixels in all.")
        if tokens > engine.model_info.max_model_len:
            raise _wrong(
                f"The images take more than {engine.model_info.max_model_len} tokens, the model's "
                "maximum context length."
            )
        images.append(image)
    return images


def _read(front: ImageFront, url: str, policy: MediaPolicy, salt: str) -> PreparedImage:
    return _prepared(front, read_source(url, policy), salt)


def _prepared(front: ImageFront, data: bytes, salt: str) -> PreparedImage:
    return front.of_file(data, salt, most_held=MAX_HELD_BYTES)


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="messages")


def parts_of(front: ImageFront, index: int, message: ChatMessage) -> list[dict[str, Any]]:
    """Return a message's parts for the chat template; ApiError 400 names a kind not understood.

    Text that spells the image placeholder is refused: it would stand for an image.
    """
    parts: list[dict[str, Any]] = []
    content = message.content
    texts = [ContentPart(text=content)] if isinstance(content, str) else content or []
    for part in texts:
        if image_url(part) is not None:
            parts.append({"type": "image"})
            continue
        if not is_text(part):
            raise _wrong(
                f"messages.{index}: a part of type {part_kind(part)[:64]!r} is not supported; "
                "this model takes text and image_url."
            )
        if front.placeholder in (part.text or ""):
            raise _wrong(
                f"messages.{index}: the text holds {front.placeholder!r}, which stands for an "
                "image; send images as parts of type image_url."
            )
        parts.append({"type": "text", "text": part.text})
    return parts
