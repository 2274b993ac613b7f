"""Images of messages: content parts to prepared images, in order, within bounds of a request."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from serving.api.images import PreparedImage
from serving.engine.images.decode import MAX_PIXELS, ImageError
from serving.engine.images.front import TOO_MANY, ImageFront
from serving.engine.images.sources import FetchFailed, LongUrl, MediaPolicy, read_source
from serving.http.errors import ApiError
from serving.http.interface import AbstractEngine
from serving.http.lanes import Lane, run_in
from serving.http.requests.protocol import ChatMessage, ContentPart, ImageUrl

MAX_HELD_BYTES = 2 << 30  # of the prepared images of all requests
MAX_ALL_PIXELS = 4 * MAX_PIXELS  # of all images of a request, decoded one after the other
_TOGETHER = 1 << 18  # characters of URLs whose images one call of a thread prepares
_INLINE = 1 << 15  # characters of URLs whose images the event loop itself looks up
_NEEDED = {
    "text": "must have a string text, and no image_url beside it",
    "image_url": "must have image_url: a URL, or an object with a url; uuid alone names no image",
}
_TEXTS = (None, "text", "input_text", "output_text")  # the last two are of responses
_REMOTE = ("http:", "https:")


def image_url(part: ContentPart) -> str | None:
    """Return the URL of a part that is an image; None for another part."""
    if part.image_url is None or part.type not in (None, "image_url"):
        return None
    given = part.image_url
    return given.url if isinstance(given, ImageUrl) else given


def is_text(part: ContentPart) -> bool:
    """Return whether a part is text and nothing else."""
    return part.text is not None and part.type in _TEXTS and part.image_url is None


def part_kind(part: ContentPart) -> str:
    """Return what to call a part that is not understood."""
    if part.type:
        return part.type
    if part.text is not None:
        return "text"
    return "image_url" if part.image_url else next(iter(part.model_extra or {}), "none")


def not_taken(index: int, part: ContentPart, kinds: tuple[str, ...]) -> ApiError:
    """Return the answer to a part that is no good one of the `kinds` that the model takes."""
    if part.type in kinds:
        return _wrong(f"messages.{index}: a part of type {part.type} {_NEEDED[part.type]}.")
    takes = "text only" if kinds == ("text",) else " and ".join(kinds)
    return _wrong(
        f"messages.{index}: a part of type {part_kind(part)[:64]!r} is not supported; "
        f"this model takes {takes}."
    )


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
    no more than one of them and the memory of one image at a time. Small ones that follow each
    other, such as frames, go to a thread together, and none goes where all were prepared before.
    """
    front: ImageFront | None = engine.images
    if front is None:
        return []  # parts are refused by name where messages are read
    urls = list(urls_of(messages))
    if len(urls) > front.max_images:
        raise _wrong(TOO_MANY.format(limit=front.max_images))
    taken = _Taken(front, len(urls), engine.model_info.max_model_len, salt)
    for group in _groups(urls):
        if _is_remote(group[0]):
            data = await run_in(Lane.FETCH, taken.fetched, group[0], policy)
            await run_in(Lane.IMAGES, taken.take, lambda data=data: data)
        elif not taken.take_known(group, policy):
            sources = [functools.partial(read_source, url, policy) for url in group]
            await run_in(Lane.IMAGES, taken.take, *sources)
    return taken.images


def _is_remote(url: str) -> bool:
    return url[:6].lower().startswith(_REMOTE)


def _length(url: str) -> int:
    return len(url.data) if isinstance(url, LongUrl) else len(url)


def _groups(urls: list[str]) -> Iterator[list[str]]:
    """Yield the URLs in order: small ones that follow each other together, others alone."""
    group, size = [], 0
    for url in urls:
        length = _TOGETHER if _is_remote(url) else _length(url)
        if group and size + length > _TOGETHER:
            yield group
            group, size = [], 0
        group.append(url)
        size += length
    if group:
        yield group


class _Taken:
    """The images of one request so far, within its bounds."""

    def __init__(self, front: ImageFront, count: int, most_tokens: int, salt: str):
        self.images: list[PreparedImage] = []
        self._front, self._salt = front, salt
        self._count, self._most_tokens = count, most_tokens
        self._pixels = self._tokens = 0

    @property
    def _which(self) -> str:
        """Return the words of an error for the next image."""
        number = len(self.images) + 1
        return f"Image {number} of {self._count}: " if self._count > 1 else ""

    def fetched(self, url: str, policy: MediaPolicy) -> bytes:
        """Return the file of the next image from another server."""
        try:
            return read_source(url, policy)
        except FetchFailed as error:
            raise ApiError(422, f"{self._which}{error}", param="messages") from None
        except ImageError as error:
            raise _wrong(f"{self._which}{error}") from None

    def take(self, *sources: Callable[[], bytes]) -> None:
        """Prepare the next images, whose files the sources give, one after the other."""
        for source in sources:
            try:
                image = self._front.of_file(source(), self._salt, most_held=MAX_HELD_BYTES)
            except ImageError as error:
                raise _wrong(f"{self._which}{error}") from None
            self._add(image)

    def take_known(self, urls: list[str], policy: MediaPolicy) -> bool:
        """Take the next images if they are small and were prepared before; False takes none."""
        if sum(map(_length, urls)) > _INLINE or not all(url[:5].lower() == "data:" for url in urls):
            return False
        known = []
        for url in urls:
            try:
                data = read_source(url, policy)
            except ImageError:  # `take` says which image it is, after those before it
                return False
            known.append(self._front.known_file(data, self._salt, most_held=MAX_HELD_BYTES))
            if known[-1] is None:
                return False
        for image in filter(None, known):
            self._add(image)
        return True

    def _add(self, image: PreparedImage) -> None:
        self._pixels += image.num_pixels
        self._tokens += image.num_tokens
        if self._pixels > MAX_ALL_PIXELS:
            raise _wrong(f"The images have more than {MAX_ALL_PIXELS} pixels in all.")
        if self._tokens > self._most_tokens:
            raise _wrong(
                f"The images take more than {self._most_tokens} tokens, the model's maximum "
                "context length."
            )
        self.images.append(image)


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
            raise not_taken(index, part, ("text", "image_url"))
        if front.placeholder in (part.text or ""):
            raise _wrong(
                f"messages.{index}: the text holds {front.placeholder!r}, which stands for an "
                "image; send images as parts of type image_url."
            )
        parts.append({"type": "text", "text": part.text})
    return parts
