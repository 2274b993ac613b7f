"""Arguments of `Engine.generate` in the forms that people write them, vLLM's among them. No jax."""

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serving.api.sampling import Sampling

# A text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Any]
_KEYS = ("prompt", "prompt_token_ids")
_IMAGES = "multi_modal_data"  # {"image": one or several}


@dataclasses.dataclass(frozen=True)
class GivenPrompt:
    """A prompt as it came: text, ids, or both; ids win. And its images."""

    text: str | None
    ids: tuple[int, ...] | None
    images: tuple[Any, ...] = ()


def given_prompt(prompt: Prompt) -> GivenPrompt:
    """Return a prompt of any form; TypeError or ValueError says which forms there are."""
    if isinstance(prompt, str):
        return GivenPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _of_mapping(prompt)
    return GivenPrompt(None, _ids(prompt))


def _of_mapping(prompt: Mapping[str, Any]) -> GivenPrompt:
    known = (*_KEYS, _IMAGES)
    unknown = next((key for key in prompt if key not in known), None)
    if unknown is not None:
        raise ValueError(f"A prompt has {unknown!r}; known are {', '.join(known)}.")
    text, ids = (prompt.get(key) for key in _KEYS)
    if text is None and ids is None:
        raise ValueError(f"A prompt must have {' or '.join(_KEYS)}.")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"prompt must be a string, got {type(text).__name__}.")
    return GivenPrompt(text, None if ids is None else _ids(ids), _images_of(prompt))


def _ids(prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, bytes | bytearray):
        raise TypeError("A prompt is a text or token ids, got bytes: decode them to a str.")
    try:
        ids = tuple(prompt)
    except TypeError:
        ids = (prompt,)
    wrong = [i for i in ids if isinstance(i, bool) or not _is_integer(i)]
    if wrong:
        raise TypeError(
            f"A prompt is a text, token ids, or a dict with {' or '.join(_KEYS)}; got "
            f"{type(wrong[0]).__name__} where a token id should be."
        )
    return tuple(operator.index(i) for i in ids)


def _is_integer(value: Any) -> bool:
    """Return whether a value is one integer, also one of an array."""
    if getattr(value, "ndim", 0):  # an array of one element can be an index, too
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _images_of(prompt: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the images of vLLM's `multi_modal_data`."""
    data = prompt.get(_IMAGES)
    if data is None:
        return ()
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise ValueError(f'{_IMAGES} must be like {{"image": [...]}}; other media are not taken.')
    given = data.get("image")
    return () if given is None else tuple(given if isinstance(given, list | tuple) else [given])


def with_images(prompts: Sequence[GivenPrompt], images: Any) -> list[GivenPrompt]:
    """Return the prompts with `images`: a list for one prompt, a list of lists for several.

    Raises TypeError for what is no list and for images that prompts have too, ValueError for images
    of another number of prompts.
    """
    if images is None:
        return list(prompts)
    if not isinstance(images, list | tuple):
        raise TypeError(f"images must be a list, got {type(images).__name__}.")
    nested = bool(images) and all(isinstance(item, list | tuple) for item in images)
    lists = list(images) if nested else [images]
    if len(lists) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but images of {len(lists)}.")
    if any(prompt.images for prompt in prompts):
        raise TypeError(f"images are given twice: in {_IMAGES} and beside the prompts.")
    pairs = zip(prompts, lists, strict=True)
    return [GivenPrompt(p.text, p.ids, tuple(image_list)) for p, image_list in pairs]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a text, a dict or a list of token ids is one prompt.

    Raises TypeError for anything else that is no list.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts must be a text, token ids, a dict with {' or '.join(_KEYS)}, or a list of "
            f"them, got {type(prompts).__name__}."
        )
    listed: list[Any] = list(prompts)
    if listed and isinstance(listed[0], str):  # as nearly all are
        return listed
    return [listed] if listed and _is_integer(listed[0]) else listed


Adapter = str | Mapping[str, float] | None  # a name, or weights by name
Adapters = Adapter | Sequence[Adapter]
Samplings = Sampling | Sequence[Sampling] | None


# What a dict of sampling values has and no sum of adapters.
_OF_SAMPLING = {"temperature", "max_tokens", "max_new_tokens", "top_p", "top_k", "min_p"}


def adapter_and_sampling(
    adapter: Any, sampling: Any, sampling_params: Any = None, lora_request: Any = None
) -> tuple[Adapters, Samplings]:
    """Return adapters and samplings, also where they came as vLLM has them.

    There `sampling_params` comes second and `lora_request` names the adapter. TypeError for two
    values of one of them, and for a dict of sampling values, as SGLang takes it.
    """
    is_name = adapter is None or isinstance(adapter, str)  # as nearly all are; a Mapping is slow
    if not is_name and isinstance(adapter, Mapping) and _OF_SAMPLING & adapter.keys():
        shown = ", ".join(sorted(_OF_SAMPLING & adapter.keys()))
        raise TypeError(
            f"a dict with {shown} is no sum of adapters: give Sampling(temperature=..., "
            "max_tokens=...) in place of the dict."
        )
    if not is_name and _is_sampling(adapter):  # generate(prompts, Sampling(...))
        adapter, sampling = None, _one_of("sampling", adapter, sampling)
    sampling = _one_of("sampling", sampling, sampling_params)
    if lora_request is not None:
        adapter = _one_of("adapter", adapter, _names(lora_request))
    return adapter, sampling


def _is_sampling(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return isinstance(value[0] if listed and value else value, Sampling)


def _one_of(name: str, one: Any, other: Any) -> Any:
    if one is not None and other is not None:
        raise TypeError(f"{name} is given twice.")
    return other if one is None else one


def _names(lora_request: Any) -> Any:
    """Return the names of one or several LoRARequests, which may be plain names."""
    if isinstance(lora_request, Sequence) and not isinstance(lora_request, str):
        return [None if one is None else _names(one) for one in lora_request]
    name = getattr(lora_request, "lora_name", lora_request)
    if not isinstance(name, str):
        raise TypeError(
            "lora_request must be the name of a loaded adapter or have a lora_name; "
            "Engine.load_adapter(name, path) loads one."
        )
    return name


def broadcast(name: str, value: Any, count: int, single: tuple[type, ...]) -> list[Any]:
    """Return `count` values: one of the types `single` repeated, or the given ones.

    Raises TypeError naming the argument for values of other types, ValueError unless there are
    `count` of them.
    """
    if isinstance(value, single):
        return [value] * count
    wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in single)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be {wanted} or a list of them, got {type(value).__name__}.")
    wrong = next((item for item in value if not isinstance(item, single)), None)
    if wrong is not None:
        raise TypeError(f"{name} must hold {wanted}, got {type(wrong).__name__}.")
    if len(value) != count:
        raise ValueError(f"{count} prompts but {len(value)} values of {name}.")
    return list(value)
