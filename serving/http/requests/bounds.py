"""The bounds of a request's fields, which follow from the model. docs/bounds.md explains them."""

import dataclasses

from serving.http.interface import AbstractEngine
from serving.http.requests.protocol import MAX_PROMPTS

SMALL_BODY = 64 << 10  # bytes of a body that holds names only
_MIN_BODY, _MAX_BODY = 1 << 20, 16 << 20  # bytes
_IMAGE_BYTES, _MAX_IMAGE_BYTES = 8 << 20, 64 << 20  # of one, of all
_MIN_VALUES, _MAX_VALUES = 1 << 16, 1 << 18
_MIN_TOKENS = 1 << 15


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits of a request, for one model."""

    context: int  # tokens of a prompt and its answer
    longest_token: int  # characters
    images: int = 0  # of one prompt

    @classmethod
    def of(cls, engine: AbstractEngine) -> "Bounds":
        """Return the bounds of the engine's model."""
        images = 0 if engine.images is None else engine.images.max_images
        return cls(engine.model_info.max_model_len, engine.tokenizer.longest_token, images)

    @property
    def body_bytes(self) -> int:
        """Bytes of a body, unless a flag says otherwise: a byte a token for MAX_PROMPTS prompts.

        Images, which come in the body, add their own.
        """
        text = min(max(MAX_PROMPTS * self.context, _MIN_BODY), _MAX_BODY)
        return text + min(self.images * _IMAGE_BYTES, _MAX_IMAGE_BYTES)

    @property
    def values(self) -> int:
        """JSON values of a body."""
        return max(min(max(MAX_PROMPTS * self.context, _MIN_VALUES), _MAX_VALUES), 2 * self.context)

    @property
    def tokens(self) -> int:
        """Token ids that /tokenize returns and /detokenize takes."""
        return max(self.context, _MIN_TOKENS)

    def characters(self, tokens: int) -> int:
        """Return the characters of the longest text that may have so many tokens."""
        return tokens * self.longest_token
