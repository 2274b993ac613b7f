"""Sampling defaults from generation_config.json. No jax."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.api.json_file import read_object
from serving.api.sampling import Sampling

FILE = "generation_config.json"
_LENGTH = "max_new_tokens"
FROM_MODEL, NONE = "auto", "vllm"  # vLLM's words for the model's own file, and for no file
# Its names are ours but for one; what else a file holds (do_sample, num_beams) changes nothing,
# here as in vLLM.
_TO_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    _LENGTH: "max_tokens",
}
_EOS = "eos_token_id"


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Defaults of `Sampling`'s fields, and tokens that end a text besides the model's own.

    `most_tokens` bounds max_tokens of every HTTP request; None: nothing but the context does.
    """

    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    most_tokens: int | None = None

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ValueError for a token id the model does not have."""
        for token in self.eos_token_ids:
            if token >= vocab_size:
                raise ValueError(f"{_EOS} must be in [0, {vocab_size - 1}], got {token}.")


def read_generation_config(
    model: str, source: str, override: Mapping[str, Any]
) -> GenerationConfig:
    """Return what the file of `source` ("auto", "vllm" or a folder) says, and over it `override`.

    Ends of a text in the model's own file are the tokenizer's to find. As in vLLM, max_new_tokens
    of a folder or of `override` also bounds requests; in the model's own file it is a default.
    ValueError, naming file and field, for a folder without the file and for a value out of bounds.
    """
    folder = Path(model if source == FROM_MODEL else source)
    names = {*_TO_SAMPLING} if source == FROM_MODEL else {*_TO_SAMPLING, _EOS}
    if source not in (FROM_MODEL, NONE) and not (folder / FILE).is_file():
        raise ValueError(f"{folder} has no {FILE}.")
    content = {} if source == NONE else read_object(folder / FILE)
    given = {name: value for name, value in content.items() if name in names}
    check_fields(given, f"{folder.name}/{FILE} (--generation-config {NONE} leaves it out)")
    given = {k: v for k, v in (given | dict(override)).items() if v is not None}
    sampling = {ours: given[name] for name, ours in _TO_SAMPLING.items() if name in given}
    is_bound = source not in (FROM_MODEL, NONE) or _LENGTH in override
    return GenerationConfig(
        sampling, _ids(given.get(_EOS)), given.get(_LENGTH) if is_bound else None
    )


def check_fields(given: Mapping[str, Any], where: str) -> None:
    """Raise ValueError, with `where` in front, for a field nobody knows or a value out of bounds.

    None stands for what is not set.
    """
    for name, value in given.items():
        if name != _EOS and name not in _TO_SAMPLING:
            allowed = ", ".join([*_TO_SAMPLING, _EOS])
            raise ValueError(f"{where}: {name} is not one of {allowed}.")
        try:
            if name == _LENGTH and value == 0 and not isinstance(value, bool):
                raise ValueError(f"{name} must be at least 1, got 0.")
            if value is not None and name != _EOS:
                Sampling(**{_TO_SAMPLING[name]: value})
            _ids(value if name == _EOS else None)
        except ValueError as error:
            raise ValueError(f"{where}: {str(error).replace('max_tokens', name)}") from None


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{_EOS} must be a token id or a list of them, got {value!r:.60}.")
    return tuple(ids)
