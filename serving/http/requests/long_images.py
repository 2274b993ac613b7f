"""Bodies with large images: the base64 is taken out before the JSON is read.

A JSON reader holds the interpreter lock and copies every text, some 2 ms for each MB, while no
other request goes on. So each long data: URL is replaced by a short name, and the image is decoded
where it lies in the body.
"""

import re
import secrets

import numpy as np
from pydantic import BaseModel, ValidationError

from serving.engine.images.sources import LongUrl
from serving.http.requests.protocol import ChatBody, ClassifyBody, ImageUrl, TokenizeBody

_LONG = 1 << 16  # bytes of a text that is taken out
_CHUNK = 1 << 20  # bytes looked at together
_MOST_HEAD = 64  # bytes before the base64
_HEAD = re.compile(rb"data:image\\?/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
_QUOTE, _SLASH, _BACKSLASH = b'"', ord("/"), ord("\\")


def read_with_images[Body: BaseModel](kind: type[Body], raw: bytearray) -> Body | None:
    """Return the checked body, each long image in it a LongUrl, which reads from `raw`.

    None where the body has no such image, or where the JSON as it came has to be read: it is
    wrong, or something else than an image is written like one.
    """
    if not issubclass(kind, ChatBody | ClassifyBody | TokenizeBody):
        return None
    short, names = _taken_out(raw)
    if not names:
        return None
    try:
        body = kind.model_validate_json(short)
    except ValidationError:
        return None
    for message in body.messages or ():
        for part in message.content if isinstance(message.content, list) else ():
            given = part.image_url
            if isinstance(given, ImageUrl):
                given.url = names.pop(given.url, given.url)
            elif given is not None:
                part.image_url = names.pop(given, given)
    return None if names else body


def _taken_out(raw: bytearray) -> tuple[bytes, dict[str, LongUrl]]:
    """Return the body with a name in place of each long image, and the images by name."""
    nonce, view = secrets.token_hex(16), memoryview(raw)  # which no text of a client has
    pieces, names, done = [], dict[str, LongUrl](), 0
    for start, end in _long_texts(raw):
        head = _HEAD.match(bytes(view[start : start + _MOST_HEAD]))
        if head is None or not _is_literal(view[start + head.end() : end]):
            continue
        name = f"{nonce}-{len(names)}"
        text = head[0].replace(b"\\", b"").decode()
        names[name] = LongUrl.of(text, view[start + head.end() : end])
        pieces += [view[done:start], name.encode()]
        done = end
    return b"".join([*pieces, view[done:]]) if names else b"", names


def _long_texts(raw: bytearray) -> list[tuple[int, int]]:
    """Return where texts of more than _LONG bytes are, without their quotes.

    Quotes are looked for from places _LONG bytes apart: a long text has one of these in it. What
    lies between two texts, and a text with escaped quotes, may be among them.
    """
    found, at = [], 0
    while at + _LONG < len(raw):
        place = at + _LONG
        start, end = raw.rfind(_QUOTE, at, place), raw.find(_QUOTE, place)
        is_long = 0 <= start < end - _LONG
        if is_long:
            found.append((start + 1, end))
        at = end if is_long else place
    return found


def _is_literal(data: memoryview) -> bool:
    """Return whether a text has no escapes but those of slashes; numpy releases the lock."""
    bytes_ = np.frombuffer(data, np.uint8)
    for start in range(0, len(bytes_), _CHUNK):
        chunk = bytes_[start : start + _CHUNK + 1]  # and the byte after it
        escapes = np.flatnonzero(chunk[:_CHUNK] == _BACKSLASH)
        if len(escapes) and (escapes[-1] + 1 == len(chunk) or np.any(chunk[escapes + 1] != _SLASH)):
            return False
    return True
