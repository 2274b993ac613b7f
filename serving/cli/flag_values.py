"""Values of flags: from a word of the command line to what it means. No jax."""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from lora_jax.hub_folder import folder_name


@dataclasses.dataclass(frozen=True)
class LoraModuleFlag:
    """An adapter to load before the server is ready."""

    name: str
    path: str
    pinned: bool = False
    digest: str = ""  # of the only files that are served under the name; "": any


def json_object(text: str) -> dict[str, Any]:
    """Return the object, or raise what argparse turns into its message."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        wanted = """an object is written in single quotes: '{"name": 1}'"""
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}; {wanted}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object.")
    return value


def json_list(text: str) -> tuple[str, ...]:
    """Return the texts of a JSON list, or of words with commas between them."""
    if not text.lstrip().startswith("["):
        return tuple(word.strip() for word in text.split(",") if word.strip())
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON list of texts.")
    return tuple(value)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_SCALES = {"k": 3, "m": 6, "g": 9, "t": 12, "K": 10, "M": 20, "G": 30, "T": 40}


def _plain(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        wanted = "must be a whole number, such as 16, 2k or 4G"
        raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}") from None


def whole_number(text: str) -> int:
    """Return an int, also of 2k (2,000), 2K (2,048), 1.5m, 4G and so on, as vLLM reads them."""
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        return _plain(text)
    number, scale = size.groups()
    if scale.islower():
        return int(float(number) * 10 ** _SCALES[scale])
    if "." in number:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {scale} counts in powers of two and takes no fraction; {scale.lower()} "
            "counts in powers of ten"
        )
    return int(number) << _SCALES[scale]


def beside_base(text: str) -> int:
    """Return the adapters of a batch, at least 1: SGLang counts the base model as one of them."""
    return max(1, whole_number(text) - 1)


def length_or_auto(text: str) -> int | None:
    """Return a number of tokens, None (the model's own) for auto and -1."""
    if text.strip().lower() in ("auto", "-1"):
        return None
    try:
        return whole_number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; auto is the model's own length") from None


def port(text: str) -> int:
    """Return a TCP port; 0 asks for a free one."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"a port is in [0, 65535], got {number}")
    return number


def dtype(text: str) -> str:
    """Return a dtype by vLLM's names; float16 is refused with the reason."""
    if text in ("half", "float16"):
        raise argparse.ArgumentTypeError(
            f"{text} is not offered: models overflow its largest number, 65504; use bfloat16, of "
            "as many bytes, or float32"
        )
    return "float32" if text == "float" else text


def kv_cache_dtype(text: str) -> str:
    """Return a dtype of the KV cache.

    fp8_e4m3 is vLLM's other name of fp8, and fp8_per_token_head its name of the scales that pages
    have here.
    """
    return "fp8" if text in ("fp8_e4m3", "fp8_per_token_head") else text


def policy(text: str) -> str:
    """Return a scheduling policy; vLLM's priority is refused with the reason."""
    if text == "priority":
        raise argparse.ArgumentTypeError("requests have no priorities here; use fcfs or sjf")
    return text


def named_parser(others: Mapping[str, str]) -> Callable[[str], str]:
    """Return a converter of another server's names of parsers; a name of ours stays."""
    return lambda text: others.get(text, text)


def lora_module(text: str) -> LoraModuleFlag:
    """Return what NAME=PATH, PATH or a JSON object of vLLM or SGLang says, or ValueError."""
    if text.lstrip().startswith("{"):
        return _lora_module_of_json(text)
    name, equals, path = text.partition("=")
    if not equals:
        name, path = folder_name(text), text
    if not name or not path:
        raise ValueError(f"--lora-modules takes NAME=PATH, not {text!r}.")
    return LoraModuleFlag(name, path)


def _lora_module_of_json(text: str) -> LoraModuleFlag:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--lora-modules: {text!r} is not JSON: {error}") from None
    known = {"name", "path", "base_model_name", "lora_name", "lora_path", "pinned"}
    unknown = sorted(set(given) - known)
    name, path = (
        given.get("name", given.get("lora_name")),
        given.get("path", given.get("lora_path")),
    )
    pinned = given.get("pinned", False)
    if unknown or not isinstance(name, str) or not isinstance(path, str):
        raise ValueError(f"--lora-modules: {text!r} must have name and path, both text.")
    if not isinstance(pinned, bool):
        raise ValueError(f"--lora-modules: pinned of {name!r} must be true or false.")
    return LoraModuleFlag(name, path, pinned)
