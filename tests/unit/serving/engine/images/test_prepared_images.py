"""The cache of prepared images: bounded in bytes, the image used longest ago goes first."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from serving.api.images import PreparedImage
from serving.engine.images.prepared_images import PreparedImages


def image(size: int) -> PreparedImage:
    patches: Any = SimpleNamespace(pixels=np.zeros(size, np.uint8))
    return PreparedImage(patches, (2, 2), 1, b"digest")


def test_the_image_used_longest_ago_goes_first_and_the_bytes_are_bounded():
    cache, images = PreparedImages(4000), {key: image(1000) for key in (b"a", b"b", b"c")}
    cache.keep(b"a", images[b"a"])
    cache.keep(b"b", images[b"b"])
    assert cache.find(b"a") is images[b"a"]
    before = cache.num_bytes
    cache.keep(b"b", image(1000))  # in place of the one before
    assert cache.num_bytes == before
    assert cache.find(b"a") is images[b"a"]
    cache.keep(b"c", images[b"c"])
    assert cache.num_bytes <= 4000
    assert [cache.find(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]


def test_an_image_larger_than_the_cache_changes_nothing():
    cache, small = PreparedImages(4000), image(1000)
    cache.keep(b"a", small)
    cache.keep(b"b", image(4000))
    assert cache.find(b"a") is small
    assert cache.find(b"b") is None
    none = PreparedImages(0)
    none.keep(b"a", small)
    assert none.find(b"a") is None
    assert none.num_bytes == 0
