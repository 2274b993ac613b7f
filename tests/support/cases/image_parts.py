"""Images as parts of messages, good and bad ones."""

import base64
import struct
import zlib
from typing import Any

from support.cases.tiny_vision import (
    HOLDER,
    picture,
    png,
)

PICTURES = [picture(40, 24, 1), picture(24, 56, 2), picture(64, 64, 3)]


def part(pixels, kind: str = "PNG", **options: Any) -> dict[str, Any]:
    data = base64.b64encode(png(pixels, kind, **options)).decode()
    url = f"data:image/{kind.lower()};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}, "uuid": "ignored"}


def bomb() -> bytes:
    """Return the head of a PNG of 60,000 x 60,000 pixels, with a good checksum."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + head + struct.pack(">I", zlib.crc32(head)) + b"\0" * 64


def sent(data: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


WRONG = {
    "truncated": (sent(png(PICTURES[0])[:-40]), 400),
    "bomb": (sent(bomb()), 400),
    "a program called an image": (sent(b"\x7fELF" + b"\0" * 200), 400),
    "another format called an image": (sent(png(PICTURES[0], "BMP")), 400),
    "bytes": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}, 400),
    "address": ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, 400),
    "elsewhere": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 400),
    "video": ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}, 400),
    "placeholder": ({"type": "text", "text": HOLDER}, 400),
    "no url": ({"type": "image_url", "image_url": {}}, 400),
    "long": (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10**6}},
        400,
    ),
}
