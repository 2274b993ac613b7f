"""Images on their way into a prompt: patches, digests, and placeholders that become tokens."""

import hashlib
from collections.abc import Sequence

import numpy as np

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.config import VisionConfig
from lora_jax.vision import layout
from lora_jax.vision.processor import ProcessorSettings, image_digest, preprocess
from serving.api.images import PreparedImage, PromptImage
from serving.images.decode import ImageError

TEXT_ONLY = "This model takes text only; it was given images."
TOO_MANY = "At most {limit} image(s) may be provided in one prompt."
_TOWER = "visual."  # how names of a tower's modules begin


class ImageFront:
    """What a model that takes images does with them before the scheduler; any thread may call."""

    def __init__(
        self,
        config: VisionConfig,
        settings: ProcessorSettings,
        *,
        placeholder: str,
        max_images: int,
        max_image_tokens: int,
    ):
        """`placeholder` is how the tokenizer spells the token that stands for an image."""
        self.token_id, self.placeholder = config.image_token_id, placeholder
        self.max_images = max_images
        self._config, self._settings, self._max_tokens = config, settings, max_image_tokens

    def check_count(self, count: int) -> None:
        """Raise ValueError for more images than one prompt may have."""
        if count > self.max_images:
            raise ValueError(TOO_MANY.format(limit=self.max_images))

    def prepare(self, pixels: np.ndarray) -> PreparedImage:
        """Return an image of uint8 [height, width, 3], ready for the tower.

        ImageError for one that is too narrow, or of more tokens than a prompt can have.
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
        digest = image_digest(pixels, self._settings)
        return PreparedImage(preprocess(pixels, self._settings), grid, count, digest)

    def expand(
        self, ids: Sequence[int], images: Sequence[PreparedImage]
    ) -> tuple[list[int], list[int]]:
        """Return the prompt with each placeholder as often as its image has tokens, and starts.

        ValueError when placeholders and images are not equally many.
        """
        self.check_count(len(images))
        places = [place for place, token in enumerate(ids) if token == self.token_id]
        if len(places) != len(images):
            raise ValueError(
                f"The prompt has {len(places)} image placeholder(s) {self.placeholder!r} for "
                f"{len(images)} image(s); each image needs one."
            )
        expanded: list[int] = []
        starts, done = [], 0
        for place, image in zip(places, images, strict=True):
            expanded += ids[done:place]
            starts.append(len(expanded))
            expanded += [self.token_id] * image.num_tokens
            done = place + 1
        return [*expanded, *ids[done:]], starts

    def placed(
        self,
        ids: Sequence[int],
        images: Sequence[PreparedImage],
        starts: Sequence[int],
        entry: AdapterEntry | None,
        salt: str = "",
    ) -> tuple[PromptImage, ...]:
        """Return the images at their tokens, with their keys of the encoder cache.

        Callers of different salts never find each other's images.

        ValueError when a token of an image stands where none is, or the other way round.
        """
        covered = np.zeros(len(ids), bool)
        for image, start in zip(images, starts, strict=True):
            covered[start : start + image.num_tokens] = True
        wanted = np.asarray(ids) == self.token_id
        total = sum(image.num_tokens for image in images)
        if not np.array_equal(covered, wanted) or total != wanted.sum():
            raise ValueError(
                f"The prompt holds the image placeholder {self.placeholder!r} where no image is."
            )
        owner = b""
        if entry is not None and any(m.startswith(_TOWER) for m in entry.report.modules):
            owner = entry.digest.encode()
        owner = b"".join(len(x).to_bytes(8, "little") + x for x in (owner, salt.encode()))
        keys = [hashlib.sha256(image.digest + owner).digest() for image in images]
        at = zip(images, starts, keys, strict=True)
        return tuple(PromptImage(image, start, key) for image, start, key in at)
