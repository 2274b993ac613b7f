"""Images of a request: what the engine keeps of them from admission to the last layer. No jax."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image ready for its tower, not yet in a prompt.

    `patches` are a lora_jax.vision.processor.Patches. Equal digests give equal rows: SHA-256 over
    size, pixels and the processor's settings.
    """

    patches: Any
    grid: tuple[int, int]  # rows and columns of patches
    num_tokens: int
    digest: bytes
    num_pixels: int = 0  # of the image as it was given


# Images of a prompt with their first tokens in it.
PlacedImages = tuple[tuple[PreparedImage, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PromptImage:
    """An image at its tokens of a prompt; `key` also names what of the adapter changes its rows."""

    image: PreparedImage
    start: int  # first token
    key: bytes

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.start + self.image.num_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class EncodeImage:
    """A tower's work before a step: the image, the rows its output goes to, the adapter's slot."""

    image: PreparedImage
    rows: tuple[int, ...]
    slot: int


@dataclasses.dataclass(frozen=True)
class ImageStats:
    """Images looked up and found in the encoder cache, and its rows."""

    queries: int = 0  # images
    hits: int = 0
    rows_used: int = 0
    rows_total: int = 0
