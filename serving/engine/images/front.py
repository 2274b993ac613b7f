"""Images on their way into a prompt: patches, digests, and placeholders that become tokens."""

import collections
import dataclasses
import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.config import VisionConfig
from lora_jax.vision import layout
from lora_jax.vision.processor import ProcessorSettings, image_digest, preprocess
from serving.api.images import PlacedImages, PreparedImage, PromptImage
from serving.api.request import QueueFull
from serving.engine.images.decode import ImageError, bytes_of, decode, pixels_of
from serving.engine.images.prepared_images import PreparedImages

TEXT_ONLY = "This model takes text only; it was given images."
TOO_MANY = "At most {limit} image(s) may be provided in one prompt."
RETRY_AFTER_S = 1.0
_TOWER = "visual."  # how names of a tower's modules begin


class _Alive(weakref.ref[PreparedImage]):
    """A weak reference to an image that knows its bytes: a third of weakref.finalize's time."""

    __slots__ = ("size",)

    def __new__(cls, image: PreparedImage, ended: Callable[["_Alive"], None], size: int) -> Self:
        alive = super().__new__(cls, image, ended)  # type: ignore[arg-type]
        alive.size = size
        return alive

    def __init__(self, image: PreparedImage, ended: Callable[["_Alive"], None], size: int):
        super().__init__(image, ended)  # type: ignore[arg-type]


class ImageFront:
    """The work on a request's images before the scheduler; any thread may call."""

    def __init__(
        self,
        config: VisionConfig,
        settings: ProcessorSettings,
        *,
        placeholder: str,
        max_images: int,
        max_image_tokens: int,
        cache_bytes: int = 0,
    ):
        """`placeholder` is how the tokenizer spells the token that stands for an image.

        Prepared images that take up to `cache_bytes` are kept for callers that send them again.
        """
        self.token_id, self.placeholder = config.image_token_id, placeholder
        self.max_images = max_images
        self._config, self._settings, self._max_tokens = config, settings, max_image_tokens
        self.prepared = PreparedImages(cache_bytes)
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._freed: collections.deque[int] = collections.deque()  # since it was last summed
        self._alive: set[_Alive] = set()  # images of requests

    def check_count(self, count: int) -> None:
        """Raise ValueError for more images than one prompt may have."""
        if count > self.max_images:
            raise ValueError(TOO_MANY.format(limit=self.max_images))

    @property
    def held_bytes(self) -> int:
        """Bytes of all prepared images that any request holds."""
        with self._lock:
            return self._summed()

    def of_caller(self, given: Any) -> PreparedImage:
        """Return an image as a Python caller gives it (`pixels_of`), ready for the tower.

        Raises what `pixels_of` and `prepare` raise.
        """
        data = bytes_of(given)
        if data is not None:
            return self.of_file(data)
        pixels = pixels_of(given)
        digest = image_digest(pixels, self._settings)
        return self._known_or(digest, lambda: self.prepare(pixels, digest=digest))

    def of_file(
        self, data: bytes, salt: str = "", *, most_held: int | None = None
    ) -> PreparedImage:
        """Return the image of a file's bytes, ready for the tower.

        A file that was prepared before is neither decoded nor resized again. Callers of different
        salts never find each other's files. Raises what `decode` and `prepare` raise.
        """

        def made() -> PreparedImage:
            return self.prepare(decode(data), most_held=most_held)

        return self._known_or(self._file_key(data, salt), made, most_held)

    def known_file(
        self, data: bytes, salt: str = "", *, most_held: int | None = None
    ) -> PreparedImage | None:
        """Return what `of_file` returns if the file was prepared before; None where it was not."""
        return self._known(self._file_key(data, salt), most_held)

    def _file_key(self, data: bytes, salt: str) -> bytes:
        key = hashlib.sha256(b"file" + self._settings.digest)
        for part in (salt.encode(), data):
            key.update(len(part).to_bytes(8, "little"))
            key.update(part)
        return key.digest()

    def _known_or(
        self, key: bytes, make: Callable[[], PreparedImage], most_held: int | None = None
    ) -> PreparedImage:
        """Return a copy of the image that is kept by a key, or a new one, which is kept then."""
        if (known := self._known(key, most_held)) is not None:
            return known
        image = make()
        self.prepared.keep(key, dataclasses.replace(image))  # no request's: it is not held
        return image

    def _known(self, key: bytes, most_held: int | None) -> PreparedImage | None:
        known = self.prepared.find(key)
        if known is None:
            return None
        size = known.patches.pixels.nbytes
        return self._held(size, most_held, lambda: dataclasses.replace(known))

    def prepare(
        self, pixels: np.ndarray, *, digest: bytes | None = None, most_held: int | None = None
    ) -> PreparedImage:
        """Return an image of uint8 [height, width, 3], ready for the tower.

        `digest` is its image_digest, where it is known. ImageError for an image that is too narrow,
        or of more tokens than a prompt can have. QueueFull when the images of all requests would
        take more than `most_held` bytes with it.
        """
        height, width = pixels.shape[:2]
        try:
            grid = self._settings.grid_of(height, width)
        except ValueError as error:
            raise ImageError(str(error)) from None
        count = layout.num_tokens(self._config, grid)
        if count > self._max_tokens:
            raise ImageError(
                f"An image of {width} x {height} pixels takes {count} tokens; at most "
                f"{self._max_tokens} fit. Send a smaller one, or set max_pixels in "
                "mm_processor_kwargs."
            )

        def made() -> PreparedImage:
            own = digest or image_digest(pixels, self._settings)
            patches = preprocess(pixels, self._settings)
            return PreparedImage(patches, grid, count, own, height * width)

        return self._held(grid[0] * grid[1] * 3 * self._config.patch_size**2, most_held, made)

    def _held(
        self, size: int, most: int | None, make: Callable[[], PreparedImage]
    ) -> PreparedImage:
        """Return a new image whose bytes count as held until it is freed."""
        self._hold(size, most)
        try:
            image = make()
        except BaseException:
            self._freed.append(size)
            raise
        self._alive.add(_Alive(image, self._ended, size))
        return image

    def _ended(self, one: "_Alive") -> None:
        # The collector may call it in any thread, so it takes no lock.
        self._alive.discard(one)
        self._freed.append(one.size)

    def _hold(self, size: int, most: int | None) -> None:
        with self._lock:
            if most is not None and self._summed() + size > most:
                raise QueueFull(
                    f"The images of waiting requests take {most} bytes at most.", RETRY_AFTER_S
                )
            self._held_bytes += size

    def _summed(self) -> int:
        while self._freed:
            self._held_bytes -= self._freed.popleft()
        return self._held_bytes

    def expand(
        self, ids: Sequence[int], images: Sequence[PreparedImage]
    ) -> tuple[list[int], list[int]]:
        """Return the prompt with each placeholder as often as its image has tokens, and starts.

        ValueError when placeholders and images are not equally many.
        """
        self.check_count(len(images))
        places = positions_of(ids, self.token_id)
        if len(places) != len(images):
            raise ValueError(
                f"The prompt has {len(places)} image placeholder(s) {self.placeholder!r} for "
                f"{len(images)} image(s); each image needs one."
            )
        expanded: list[int] = []
        starts, done = [], 0
        for position, image in zip(places, images, strict=True):
            expanded += ids[done:position]
            starts.append(len(expanded))
            expanded += [self.token_id] * image.num_tokens
            done = position + 1
        return [*expanded, *ids[done:]], starts

    def placed(
        self,
        ids: Sequence[int],
        images: PlacedImages,
        entry: AdapterEntry | None,
        salt: str = "",
    ) -> tuple[PromptImage, ...]:
        """Return the images at their tokens, with their keys of the encoder cache.

        Callers of different salts never find each other's images.

        ValueError when a token of an image stands where none is, or the other way round.
        """
        self._check_places(ids, images)
        owner = b""
        if images and entry is not None and f"\n{_TOWER}" in "\n".join(["", *entry.report.modules]):
            owner = entry.digest.encode()
        owner = b"".join([len(x).to_bytes(8, "little") + x for x in (owner, salt.encode())])
        keys = [hashlib.sha256(image.digest + owner).digest() for image, _ in images]
        at = zip(images, keys, strict=True)
        return tuple([PromptImage(image, start, key) for (image, start), key in at])

    def _check_places(self, ids: Sequence[int], images: PlacedImages) -> None:
        """Raise ValueError unless all tokens of images, and no others, stand where images do."""
        total = last = 0
        are_full = True
        for start, count in sorted([(start, image.num_tokens) for image, start in images]):
            is_full = start >= last and ids[start : start + count].count(self.token_id) == count
            are_full, last, total = are_full and is_full, start + count, total + count
        if not are_full or total != ids.count(self.token_id):
            raise ValueError(
                f"The prompt holds the image placeholder {self.placeholder!r} where no image is."
            )


def positions_of(ids: Sequence[int], token: int) -> list[int]:
    """Return where a token stands among others; it looks at none of these one by one."""
    places, start = [], 0
    for _ in range(ids.count(token)):
        places.append(ids.index(token, start))
        start = places[-1] + 1
    return places
