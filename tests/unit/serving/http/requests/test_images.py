"""Images of messages: which parts are images, in what order, and every way to be refused."""

import asyncio
import base64
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases.tiny_vision import picture, png
from support.cases.vision_configs import SETTINGS, TOWER

from serving.api.request import QueueFull
from serving.engine.images import front as front_module
from serving.engine.images.decode import decode
from serving.engine.images.front import ImageFront
from serving.engine.images.sources import FetchFailed, MediaPolicy
from serving.http.errors import ApiError
from serving.http.lanes import Lane
from serving.http.requests import images as module
from serving.http.requests.images import image_url, not_taken, parts_of, read_images, urls_of
from serving.http.requests.protocol import ChatMessage, ContentPart

FRONT = ImageFront(TOWER, SETTINGS, placeholder="<image>", max_images=3, max_image_tokens=64)
ENGINE: Any = SimpleNamespace(images=FRONT, model_info=SimpleNamespace(max_model_len=100))


def url(height: int, width: int) -> str:
    data = base64.b64encode(png(picture(height, width))).decode()
    return f"data:image/png;base64,{data}"


def user(*parts: dict[str, Any] | str) -> ChatMessage:
    content = parts[0] if isinstance(parts[0], str) else list(parts)
    return ChatMessage.model_validate({"role": "user", "content": content})


def image(at: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": at, **more}}


def read(*messages: ChatMessage, policy: MediaPolicy | None = None):
    return asyncio.run(read_images(ENGINE, list(messages), policy or MediaPolicy(), ""))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "u"}, "uuid": "x"},
        {"image_url": {"url": "u"}},
        {"image_url": "u"},
        {"type": "image_url", "image_url": "u"},
    ],
)
def test_every_form_of_a_part_names_its_url(part: dict[str, Any]):
    assert image_url(ContentPart.model_validate(part)) == "u"


def test_images_come_in_the_order_of_the_messages():
    messages = [
        user({"type": "text", "text": "a"}, image("1"), image("2")),
        user("words"),
        user(image("3")),
    ]
    assert list(urls_of(messages)) == ["1", "2", "3"]
    sizes = [(16, 24), (24, 16), (8, 8)]
    made = read(*(user(image(url(*size))) for size in sizes))
    assert [(i.grid[0] * 4, i.grid[1] * 4) for i in made] == sizes


def test_parts_for_the_template_keep_their_order():
    message = user({"type": "text", "text": "a"}, image("u"), {"text": "b"})
    assert parts_of(FRONT, 0, message) == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "text", "text": "b"},
    ]


@pytest.mark.parametrize("part", ["x <image> y", {"type": "text", "text": "<image>"}])
def test_text_may_not_spell_the_placeholder(part):
    with pytest.raises(ApiError, match="stands for an image") as caught:
        parts_of(FRONT, 2, user(part))
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("kind", ["video_url", "input_audio", "image", "file", "refusal"])
def test_other_parts_are_refused_by_their_type(kind: str):
    with pytest.raises(ApiError, match=f"type '{kind}' is not supported"):
        parts_of(FRONT, 0, user({"type": kind, kind: {"url": "u"}}))


def test_a_part_that_lacks_its_own_field_is_told_which():
    for part, message in (
        ({"type": "text"}, "must have a string text"),
        ({"type": "text", "text": "a", "image_url": "u"}, "no image_url beside it"),
        ({"type": "image_url", "uuid": "a"}, "must have image_url"),
        ({"type": "image_url", "text": "a"}, "must have image_url"),
    ):
        with pytest.raises(ApiError, match=message):
            parts_of(FRONT, 0, user(part))
    nothing, image = (ContentPart.model_validate({"type": t}) for t in ("text", "image_url"))
    assert "must have a string text" in str(not_taken(0, nothing, ("text",)))
    assert "takes text only" in str(not_taken(0, image, ("text",)))


GOOD = url(16, 16)
REFUSED = {
    "too many": ([image(GOOD)] * 4, 400, r"At most 3 image\(s\) may be provided in one prompt"),
    "address": ([image("http://example.org/a.png")], 400, "Only data:image"),
    "file": ([image("file:///etc/passwd")], 400, "--allowed-local-media-path"),
    "scheme": ([image("ftp://example.org/a.png")], 400, "Only data:image"),
    "not base64": ([image("data:image/png;base64,!!!!")], 400, "base64 is damaged"),
    "not an image": ([image("data:image/png;base64,aGVsbG8=")], 400, "not one of PNG"),
    "narrow": ([image(url(1, 300))], 400, "too narrow"),
    "the second": ([image(GOOD), image("data:,")], 400, "^Image 2 of 2: "),
    "tokens": ([image(url(64, 64))] * 2, 400, "more than 100 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_has_its_status_and_a_fixed_text(case: str):
    parts, status, text = REFUSED[case]
    with pytest.raises(ApiError, match=text) as caught:
        read(user(*parts))
    assert (caught.value.status, caught.value.param) == (status, "messages")
    assert "example" not in caught.value.message
    assert "etc" not in caught.value.message
    assert len(read(user(image(GOOD)))) == 1  # the next one works


def test_a_mislabelled_file_is_what_it_holds():
    data = base64.b64encode(png(picture(8, 8), "JPEG")).decode()
    named, right = (image(f"data:image/{kind};base64,{data}") for kind in ("png", "jpeg"))
    (one,), (other,) = read(user(named)), read(user(right))
    assert one.digest == other.digest


def test_a_failed_fetch_is_422(monkeypatch: pytest.MonkeyPatch):
    def fail(at: str, policy: MediaPolicy) -> bytes:
        raise FetchFailed("The image could not be fetched.")

    monkeypatch.setattr(module, "read_source", fail)
    with pytest.raises(ApiError, match="could not be fetched") as caught:
        read(user(image("https://pictures.test/a.png")))
    assert (caught.value.status, caught.value.param) == (422, "messages")


def test_pixels_of_all_images_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_ALL_PIXELS", 300)
    with pytest.raises(ApiError, match="more than 300 pixels in all"):
        read(user(image(GOOD), image(GOOD)))


def test_images_are_decoded_by_few_threads_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    """Six requests at once; each image is held until the loop has run on meanwhile."""
    lock, held, busy, most = threading.Lock(), threading.Event(), 0, 0

    def slow(data: bytes):
        nonlocal busy, most
        with lock:
            busy, most = busy + 1, max(most, busy + 1)
        assert held.wait(60), "the event loop stood still"
        with lock:
            busy -= 1
        return decode(data)

    async def run() -> list[list[Any]]:
        messages = [user(image(GOOD))]
        reads = [read_images(ENGINE, messages, MediaPolicy(), "") for _ in range(6)]
        tasks = [asyncio.create_task(each) for each in reads]
        while busy < Lane.IMAGES.value[1]:
            await asyncio.sleep(0.001)
        held.set()
        return await asyncio.gather(*tasks)

    monkeypatch.setattr(front_module, "decode", slow)
    assert [len(images) for images in asyncio.run(run())] == [1] * 6
    assert most == Lane.IMAGES.value[1] == 2


def test_small_images_go_to_a_thread_together(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []

    async def counted(lane: Lane, function, *args):
        calls.append(len(args))
        return function(*args)

    monkeypatch.setattr(module, "run_in", counted)
    three = [url(16, 16), url(8, 8), url(16, 8)]
    assert len(read(user(*map(image, three)))) == 3
    assert calls == [3]
    monkeypatch.setattr(module, "_TOGETHER", len(three[0]))
    read(user(*map(image, three)))
    assert calls == [3, 1, 1, 1]


def test_small_images_that_are_known_go_to_no_thread(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []

    async def counted(lane: Lane, function, *args):
        calls.append(len(args))
        return function(*args)

    monkeypatch.setattr(module, "run_in", counted)
    options: dict[str, Any] = {"placeholder": "<image>", "max_images": 3, "max_image_tokens": 64}
    keeping: Any = SimpleNamespace(
        images=ImageFront(TOWER, SETTINGS, **options, cache_bytes=1 << 20),
        model_info=SimpleNamespace(max_model_len=100),
    )

    def asked(*urls: str, salt: str = ""):
        message = user(*map(image, urls))
        return asyncio.run(read_images(keeping, [message], MediaPolicy(), salt))

    two = [url(16, 16), url(8, 8)]
    first, again = asked(*two), asked(*two)
    assert [one.digest for one in first] == [one.digest for one in again]
    assert calls == [2]
    del first, again
    assert keeping.images.held_bytes == 0
    asked(*two, salt="another caller")
    asked(two[0], url(16, 8))
    with pytest.raises(ApiError, match="Image 2 of 2: The image's base64 is damaged"):
        asked(two[0], "data:image/png;base64,!")
    assert calls == [2, 2, 2, 2]
    monkeypatch.setattr(module, "_INLINE", len(two[0]) - 1)
    asked(two[0])
    assert calls == [2, 2, 2, 2, 1]


def test_images_of_all_requests_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 100)  # less than one
    with pytest.raises(QueueFull, match="images of waiting requests"):
        read(user(image(GOOD)))


def test_a_model_of_text_reads_no_images():
    engine: Any = SimpleNamespace(images=None)
    assert asyncio.run(read_images(engine, [user(image(GOOD))], MediaPolicy(), "")) == []
