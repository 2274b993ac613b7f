"""Bodies with large images: what is taken out of the JSON, and what is read as it came."""

import base64
import json
from typing import Any

import pytest

from serving.engine.images.sources import LongUrl, MediaPolicy, read_source
from serving.http.requests import long_images as module
from serving.http.requests.images import _groups, urls_of
from serving.http.requests.long_images import read_with_images
from serving.http.requests.protocol import ChatBody, ClassifyBody, CompletionBody, TokenizeBody

FILES = [bytes(range(256)) * 700, b"\xff\xef\xfe" * 80_000]  # base64 with many slashes
POLICY = MediaPolicy()


def url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


def raw_of(*parts: dict[str, Any] | str, **fields: Any) -> bytearray:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return bytearray(json.dumps(body), "utf-8")


def image(at: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": at, "detail": "low"}}


@pytest.mark.parametrize("kind", [ChatBody, ClassifyBody, TokenizeBody])
@pytest.mark.parametrize("escaped", [False, True])
def test_long_images_are_read_from_the_body(kind, escaped: bool):
    bare = {"type": "image_url", "image_url": url(FILES[1], "DATA:image/webp;BASE64,")}
    raw = raw_of("a", image(url(FILES[0])), bare, image("data:image/png;base64,AAAA"), "b")
    raw = raw.replace(b"/", b"\\/") if escaped else raw
    body = read_with_images(kind, raw)
    assert body is not None
    assert body.messages is not None
    urls = list(urls_of(body.messages))
    assert [isinstance(one, LongUrl) for one in urls] == [True, True, False]
    assert [read_source(one, POLICY) for one in urls[:2]] == FILES
    assert urls[1] == "DATA:image/webp;BASE64,"
    assert [len(group) for group in _groups(urls)] == [1, 1, 1]  # by the size of their base64
    parts = body.messages[0].content
    assert isinstance(parts, list)
    assert [part.text for part in parts] == ["a", None, None, None, "b"]


LONG = url(FILES[0])
AS_IT_CAME = {
    "no image": raw_of("x" * 100_000),
    "a short image": raw_of(image("data:image/png;base64,AAAA")),
    "an image as a text": raw_of(LONG),
    "an image in an unknown field": raw_of("a", x={"url": LONG}),
    "an image in an unknown part": raw_of({"type": "video_url", "video_url": {"url": LONG}}),
    "an image and the same as a text": raw_of(image(LONG), LONG),
    "an image as a key": raw_of("a", **{LONG: 1}),
    "a field twice": raw_of(image(LONG)).replace(b'"url"', b'"url": "%s", "url"' % LONG.encode()),
    "another escape": raw_of(image(LONG)).replace(b"AAEC", b"\\u0041AEC", 1),
    "JSON that ends early": raw_of(image(LONG))[:-2],
    "an image that ends early": raw_of(image(LONG))[:-40],
    "a wrong field": raw_of(image(LONG), max_tokens="1"),
    "a quote within": raw_of(image(LONG + '"' + "A" * 100_000)),
}  # fmt: skip


@pytest.mark.parametrize("case", AS_IT_CAME)
def test_other_bodies_are_read_as_they_came(case: str):
    assert read_with_images(ChatBody, AS_IT_CAME[case]) is None


def test_other_kinds_are_read_as_they_came():
    assert read_with_images(CompletionBody, raw_of(image(LONG))) is None


@pytest.mark.parametrize("size", [40, 63, 64, 65, 66, 130, 700])
def test_long_texts_are_found_wherever_they_are(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_LONG", 64)
    for before in range(0, 200, 7):
        raw = bytearray(b'{"a": %s, "b": "%s", "c": ""}' % (b"1" * before, b"x" * size))
        texts = [bytes(raw[a:b]) for a, b in module._long_texts(raw)]
        assert (b"x" * size in texts) == (size > 64 - 1), before


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
def test_only_slashes_may_be_escaped(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_CHUNK", size)
    good = [b"", b"a", b"a\\/b", b"\\/\\/", b"abcdefg\\/"]
    bad = [b"\\", b"a\\n", b"\\\\/", b"abc\\/\\", b"\\/\\u0041"]
    assert [module._is_literal(memoryview(data)) for data in good] == [True] * len(good)
    assert not any(module._is_literal(memoryview(data)) for data in bad)
