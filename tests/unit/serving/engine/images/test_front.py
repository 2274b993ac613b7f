"""Placeholders to tokens, keys by adapter, and what does not fit."""

import dataclasses
import gc
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support.cases.tiny_vision import picture, png
from support.cases.vision_configs import SETTINGS, TOWER

from lora_jax.vision.processor import preprocess
from serving.api.request import QueueFull
from serving.engine.images import front as module
from serving.engine.images.decode import ImageError, decode
from serving.engine.images.front import ImageFront

CONFIG = dataclasses.replace(TOWER, image_token_id=99)
FRONT = ImageFront(CONFIG, SETTINGS, placeholder="<image>", max_images=2, max_image_tokens=40)
SMALL, WIDE = FRONT.prepare(picture(16, 16)), FRONT.prepare(picture(8, 24))


def entry(*modules: str, digest: str = "abc") -> SimpleNamespace:
    return SimpleNamespace(digest=digest, report=SimpleNamespace(modules=dict.fromkeys(modules)))


def test_each_placeholder_becomes_its_image_s_tokens():
    ids, starts = FRONT.expand([1, 99, 2, 99, 3], [SMALL, WIDE])
    assert ids == [1, 99, 99, 99, 99, 2, 99, 99, 99, 3]
    assert starts == [1, 6]
    placed = FRONT.placed(ids, tuple(zip([SMALL, WIDE], starts, strict=True)), None)
    assert [(image.start, image.end) for image in placed] == [(1, 5), (6, 9)]


def test_keys_follow_the_adapter_only_where_it_changes_rows():
    ids, starts = FRONT.expand([99], [SMALL])

    def key(adapter, salt: str = "") -> bytes:
        return FRONT.placed(ids, ((SMALL, starts[0]),), adapter, salt)[0].key

    assert key(None) == key(entry("q_proj", "lm_head"))
    assert key(None) != key(entry("q_proj", "visual.attn.qkv"))
    of_tower = [key(entry("visual.attn.qkv", digest=digest)) for digest in ("a", "b")]
    assert of_tower[0] != of_tower[1], "an adapter that was loaded anew has other rows"
    assert key(None) != key(None, "tenant")
    assert len(key(None)) == 32
    assert FRONT.prepare(picture(16, 16)).digest == SMALL.digest != WIDE.digest


def test_ids_in_a_file_are_no_part_of_the_key():
    pixels, exif = picture(16, 16), Image.Exif()
    exif[0xA420] = "the id of another image"
    plain, named = png(pixels), png(pixels, exif=exif)
    assert plain != named
    digests = {FRONT.prepare(decode(data)).digest for data in (plain, named)}
    assert digests == {SMALL.digest}


def test_bytes_of_images_are_counted_while_anyone_holds_them():
    front = ImageFront(CONFIG, SETTINGS, placeholder="<image>", max_images=2, max_image_tokens=40)
    first = front.prepare(picture(16, 16))
    size = first.patches.pixels.nbytes
    assert front.held_bytes == size == 16 * 16 * 3
    with pytest.raises(QueueFull, match=f"{2 * size - 1} bytes at most"):
        front.prepare(picture(16, 16), most_held=2 * size - 1)
    second = front.prepare(picture(16, 16), most_held=2 * size)
    assert front.held_bytes == 2 * size
    del first, second
    gc.collect()
    assert front.held_bytes == 0


def caching(max_bytes: int) -> ImageFront:
    sizes = {"max_images": 2, "max_image_tokens": 40, "cache_bytes": max_bytes}
    return ImageFront(CONFIG, SETTINGS, placeholder="<image>", **sizes)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_known_image_is_prepared_once_for_each_salt(as_file, monkeypatch: pytest.MonkeyPatch):
    front, resized = caching(1 << 20), []
    monkeypatch.setattr(module, "preprocess", lambda *a: (resized.append(1), preprocess(*a))[1])
    given = png(picture(20, 12)) if as_file else picture(20, 12)
    want = FRONT.prepare(picture(20, 12))
    resized.clear()
    images = [front.of_caller(given) for _ in range(3)]
    for image in images:
        np.testing.assert_array_equal(image.patches.pixels, want.patches.pixels)
        facts = [(i.grid, i.num_tokens, i.digest, i.num_pixels) for i in (image, want)]
        assert facts[0] == facts[1]
        assert image.num_pixels == 240
    assert len(resized) == 1
    # Each is held, and what is kept is held by nobody.
    assert front.held_bytes == 3 * want.patches.pixels.nbytes
    with pytest.raises(QueueFull):
        front.of_file(png(picture(20, 12)), most_held=front.held_bytes)
    del image, images
    gc.collect()
    assert front.held_bytes == 0
    resized.clear()
    for salt in ("a", "b", "a"):
        front.of_file(png(picture(20, 12)), salt)
    assert len(resized) == 2


def test_a_file_that_fails_fails_again_and_is_not_kept():
    front = caching(1 << 20)
    for bad in (png(picture(16, 16))[:40], png(picture(64, 64)), b"GIF89a"):
        for _ in range(2):
            with pytest.raises(ImageError):
                front.of_file(bad)
    assert front.prepared.num_bytes == 0


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"has 1 image placeholder.*for 2 image"):
        FRONT.expand([99], [SMALL, WIDE])
    with pytest.raises(ValueError, match=r"At most 2 image\(s\) may be provided in one prompt"):
        FRONT.expand([99] * 3, [SMALL] * 3)
    with pytest.raises(ValueError, match="where no image is"):
        FRONT.placed([1, 99], (), None)
    with pytest.raises(ValueError, match="where no image is"):
        FRONT.placed([99, 1, 1, 1], ((SMALL, 0),), None)
    with pytest.raises(ValueError, match="where no image is"):  # they overlap
        FRONT.placed([99] * 7 + [1, 99], ((SMALL, 0), (SMALL, 3)), None)
    with pytest.raises(ImageError, match="takes 64 tokens; at most 40 fit"):
        FRONT.prepare(picture(64, 64))
    with pytest.raises(ImageError, match="too narrow"):
        FRONT.prepare(np.zeros((1, 201, 3), np.uint8))
