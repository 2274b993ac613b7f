"""One prompt of a Python caller, ready to be handed to an engine: tokens, images, how. No jax."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from serving.api.images import PlacedImages
from serving.api.sampling import Sampling
from serving.engine.images.front import ImageFront
from serving.engine.inputs.generate_arguments import (
    Adapter,
    Prompt,
    adapter_and_sampling,
    broadcast,
    given_prompt,
    with_images,
)
from serving.engine.inputs.image_inputs import read_prompts
from serving.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class SinglePrompt:
    """A prompt, its adapter and its sampling; `text` is None where it came as token ids."""

    text: str | None
    ids: list[int]
    images: PlacedImages
    adapter: Adapter
    sampling: Sampling


def single_prompt(
    tokenizer_of: Callable[[Adapter], Tokenizer],
    front: ImageFront | None,
    default: Sampling,
    prompt: Prompt,
    adapter: Any,
    sampling: Any,
    images: Any = None,
    **vllm: Any,
) -> SinglePrompt:
    """Return the prompt of a call, in any of the forms that `Engine.generate` takes.

    `tokenizer_of` gives an adapter's, `default` is the sampling where none is given, `vllm` has
    `sampling_params` and `lora_request`. Raises TypeError or ValueError for arguments that are not
    understood.
    """
    name, wanted = adapter_and_sampling(adapter, sampling, **vllm)
    (name,) = broadcast("adapter", name, 1, (str, Mapping, type(None)))
    (wanted,) = broadcast("sampling", default if wanted is None else wanted, 1, (Sampling,))
    (given,) = with_images([given_prompt(prompt)], images)
    (ids,), (placed,) = read_prompts([tokenizer_of(name)], front, [given])
    return SinglePrompt(given.text, ids, placed, name, wanted)
