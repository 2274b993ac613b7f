"""Prompts of Python callers as token ids with images placed in them. No jax."""

from collections.abc import Sequence

from lora_jax.adapters.entries import AdapterEntry
from serving.api.images import PlacedImages, PreparedImage, PromptImage
from serving.engine.images.front import TEXT_ONLY, ImageFront
from serving.engine.inputs.generate_arguments import GivenPrompt
from serving.text.tokenizer import Tokenizer


def read_prompts(
    tokenizers: Sequence[Tokenizer], front: ImageFront | None, prompts: Sequence[GivenPrompt]
) -> tuple[list[list[int]], list[PlacedImages]]:
    """Return token ids of each prompt, and its images where they stand in them.

    Each prompt has its tokenizer. `front` is None where the model takes text only. ValueError for
    images that do not fit.
    """
    ids, placed = [], []
    for tokenizer, prompt in zip(tokenizers, prompts, strict=True):
        text = prompt.text or ""
        prompt_ids = tokenizer.encode_again(text) if prompt.ids is None else list(prompt.ids)
        prepared: list[PreparedImage] = []
        starts: list[int] = []
        if prompt.images:
            if front is None:
                raise ValueError(TEXT_ONLY)
            front.check_count(len(prompt.images))
            prepared = [front.of_caller(image) for image in prompt.images]
            prompt_ids, starts = front.expand(prompt_ids, prepared)
        ids.append(prompt_ids)
        placed.append(tuple(zip(prepared, starts, strict=True)))
    return ids, placed


def placed_images(
    front: ImageFront | None,
    prompt_ids: Sequence[int],
    images: PlacedImages,
    entry: AdapterEntry | None,
    salt: str = "",
) -> tuple[PromptImage, ...]:
    """Return a request's images with their keys; ValueError when its prompt disagrees."""
    if front is None:
        if images:
            raise ValueError(TEXT_ONLY)
        return ()
    return front.placed(prompt_ids, images, entry, salt)
