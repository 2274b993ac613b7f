"""Speculation of an engine, with vLLM's names, checked once. No jax."""

import dataclasses
from collections.abc import Mapping

METHOD = "ngram"
MAX_DRAFTS = 32  # tokens of one draft
MAX_LOOKUP = 32  # tokens that a repetition is looked up by
_DEFAULT_LOOKUP = 5


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """Drafts of `num_speculative_tokens` at most, copied from what followed the longest repetition.

    The last `prompt_lookup_min` tokens at least, `prompt_lookup_max` at most, must stand somewhere
    before in the prompt or the answer.
    """

    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int

    @classmethod
    def of(cls, given: object) -> "SpeculativeConfig | None":
        """Return what vLLM's JSON object says, None for an empty one; ValueError names the key."""
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config must map names to values, got {given!r:.60}.")
        if not given:
            return None
        names = ("method", *(field.name for field in dataclasses.fields(cls)))
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            raise ValueError(
                f"speculative_config.{unknown!s:.60} is not one of {', '.join(names)}; drafts are "
                "copied from the text (ngram), no second model makes them."
            )
        if given.get("method") != METHOD:
            raise ValueError(
                f'speculative_config.method must be "{METHOD}", got {given.get("method")!r:.60}.'
            )
        count = _check_int(given, "num_speculative_tokens", given.get("num_speculative_tokens"))
        low, high = (given.get(f"prompt_lookup_{end}") for end in ("min", "max"))
        if low is None and high is None:
            low = high = _DEFAULT_LOOKUP
        low = _check_int(given, "prompt_lookup_min", high if low is None else low)
        high = _check_int(given, "prompt_lookup_max", low if high is None else high)
        if low > high:
            raise ValueError(
                f"speculative_config.prompt_lookup_min ({low}) must be at most prompt_lookup_max "
                f"({high})."
            )
        return cls(count, low, high)


def _check_int(given: Mapping, name: str, value: object) -> int:
    most = MAX_DRAFTS if name == "num_speculative_tokens" else MAX_LOOKUP
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        got = f"got {value!r:.60}" if name in given else "it is not given"
        raise ValueError(f"speculative_config.{name} must be an integer in [1, {most}], {got}.")
    return value
