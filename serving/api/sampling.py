"""Sampling parameters of a request, with every number checked. No jax.

The bounds are vLLM's where it has any; the others keep one request from delaying the rest.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Self

from serving.api.structured_outputs import StructuredOutputs

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_TOKEN_IDS = 300
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 64  # characters
MAX_BAD_WORD_TOKENS = 16
MAX_LOGPROBS = 20
MAX_INT32 = 2**31 - 1
GREEDY_TEMPERATURE = 1e-5  # below it the most likely token is taken
MIN_TEMPERATURE = 1e-2  # smaller ones overflow float32; vLLM raises them to this, and so do we
MIN_TOP_P = 2.0**-126  # smaller ones are 0 on the device, where not even the likeliest token stays

# What vLLM's None means.
_WITHOUT = {
    "max_tokens": MAX_INT32,
    "stop": (),
    "stop_token_ids": (),
    "logit_bias": {},
    "bad_words": (),
}


def _shown(value: object) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number of thousands of digits"


def _check_int(field: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be an integer, got {_shown(value)}.")
    if not low <= value <= high:
        raise ValueError(f"{field} must be in [{low}, {high}], got {_shown(value)}.")
    return value


def _check_float(
    field: str, value: object, low: float, high: float, *, above_low: bool = False
) -> float:
    """Return the value as a float; `above_low` leaves the lower bound itself out."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} must be a number, got {_shown(value)}.")
    inside = low < value <= high if above_low else low <= value <= high
    if not inside:  # NaN and infinities fail here too, and so do integers too large for a float
        bracket = "(" if above_low else "["
        raise ValueError(f"{field} must be in {bracket}{low:g}, {high:g}], got {_shown(value)}.")
    return float(value)


def _check_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be true or false, got {_shown(value)}.")


def _check_list(field: str, value: object, limit: int) -> tuple:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{field} must be a list, got {_shown(value)}.")
    if len(value) > limit:
        raise ValueError(f"{field} must have at most {limit} entries, got {len(value)}.")
    return tuple(value)


def _check_stop(value: object) -> tuple[str, ...]:
    stops = _check_list("stop", (value,) if isinstance(value, str) else value, MAX_STOP_STRINGS)
    for stop in stops:
        if not isinstance(stop, str):
            raise ValueError(f"stop must hold strings, got {_shown(stop)}.")
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise ValueError(
                f"stop strings must have 1 to {MAX_STOP_LENGTH} characters, got {len(stop)}."
            )
    return stops


def _check_allowed(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _check_list("allowed_token_ids", value, MAX_ALLOWED_TOKEN_IDS)
    if not ids:
        raise ValueError("allowed_token_ids must name at least one token, or be left out.")
    return tuple(_check_int("allowed_token_ids entry", token, 0, MAX_INT32) for token in ids)


def _check_bad_words(value: object) -> tuple[str, ...]:
    words = _check_list("bad_words", value, MAX_BAD_WORDS)
    for word in words:
        if not isinstance(word, str):
            raise ValueError(f"bad_words must hold strings, got {_shown(word)}.")
        if not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
            raise ValueError(
                f"bad_words must have 1 to {MAX_BAD_WORD_LENGTH} characters each and not only "
                f"spaces, got {_shown(word)}."
            )
    return words


def _check_logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {_shown(value)}.")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(
            f"logit_bias must have at most {MAX_LOGIT_BIAS} entries, got {len(value)}."
        )
    return {
        _check_int("logit_bias token id", token, 0, MAX_INT32): _check_float(
            f"logit_bias[{token}]", bias, -100.0, 100.0
        )
        for token, bias in value.items()
    }


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling of one request; a value out of bounds is a ValueError naming field and range.

    `top_k` 0 or -1 and `top_p` 1 mean off. `max_tokens` None is what the context holds, as is a
    larger number; 0 scores the prompt only and so needs `echo` or `prompt_logprobs`. None means no
    entry in `stop`, `stop_token_ids`, `logit_bias` and `bad_words`. Without a `seed` the engine
    draws one per request. `structured_outputs` may be an object with vLLM's fields: the answer
    follows the structure and ends with it. `min_tokens` and `ignore_eos` delay the end only if the
    structure allows more text. An answer consists of `allowed_token_ids` only and never completes
    one of `bad_words`; both work with all other parameters.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()

    def __new__(cls, *args: object, **fields: object) -> Self:
        del args
        unknown = next((name for name in fields if name not in cls.__dataclass_fields__), None)
        if unknown is not None:
            raise TypeError(
                f"Sampling has no field {unknown[:64]!r}. docs/how-to/from-vllm-llm.md says what "
                "becomes of those of vllm.SamplingParams."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field, nothing in _WITHOUT.items():
            if getattr(self, field) is None:
                self._set(**{field: nothing})
        if self.structured_outputs is not None:
            self._set(structured_outputs=StructuredOutputs.of(self.structured_outputs))
        self._check_lengths()
        self._check_choice_of_tokens()
        self._check_stopping()
        for field in (
            "ignore_eos",
            "echo",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "detokenize",
        ):
            _check_bool(field, getattr(self, field))
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True.")

    def _set(self, **values: object) -> None:
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def _check_lengths(self) -> None:
        _check_int("max_tokens", self.max_tokens, 0, MAX_INT32)
        _check_int("min_tokens", self.min_tokens, 0, MAX_INT32)
        _check_int("n", self.n, 1, MAX_CHOICES)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), 0, MAX_LOGPROBS)
        _check_bool("echo", self.echo)
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError(
                "max_tokens must be at least 1 without echo or prompt_logprobs, got 0."
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}."
            )

    def _check_choice_of_tokens(self) -> None:
        temperature = _check_float("temperature", self.temperature, 0.0, 100.0)
        if GREEDY_TEMPERATURE <= temperature < MIN_TEMPERATURE:
            temperature = MIN_TEMPERATURE
        self._set(
            temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
            top_k=max(0, _check_int("top_k", self.top_k, -1, MAX_INT32)),
            top_p=max(MIN_TOP_P, _check_float("top_p", self.top_p, 0.0, 1.0, above_low=True)),
            min_p=_check_float("min_p", self.min_p, 0.0, 1.0),
            repetition_penalty=_check_float(
                "repetition_penalty", self.repetition_penalty, 0.01, 100.0
            ),
            presence_penalty=_check_float("presence_penalty", self.presence_penalty, -2.0, 2.0),
            frequency_penalty=_check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            logit_bias=_check_logit_bias(self.logit_bias),
            allowed_token_ids=_check_allowed(self.allowed_token_ids),
            bad_words=_check_bad_words(self.bad_words),
        )
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)

    def _check_stopping(self) -> None:
        ids = _check_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        for token in ids:
            _check_int("stop_token_ids entry", token, 0, MAX_INT32)
        self._set(stop=_check_stop(self.stop), stop_token_ids=ids)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken, so that no random number is drawn."""
        return self.temperature == 0.0

    @property
    def uses_history(self) -> bool:
        """True if a penalty looks at the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ValueError for a token id the model does not have."""
        for field, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(
                        f"{field} token id must be in [0, {vocab_size - 1}], got {token}."
                    )

    def check_first(self, bad_words: Sequence[Sequence[int]], end_ids: Sequence[int]) -> None:
        """Raise ValueError where no allowed token may be the first of an answer.

        `bad_words` are the tokens of each word, `end_ids` what ends the model's texts.
        """
        if self.allowed_token_ids is None:
            return
        barred = {word[0] for word in bad_words if len(word) == 1}
        if self.min_tokens > 0 and self.structured_outputs is None:
            barred |= {*end_ids, *self.stop_token_ids}
        if barred.issuperset(self.allowed_token_ids):
            raise ValueError(
                "allowed_token_ids leave no first token: each is one of bad_words, or ends the "
                "text, which min_tokens forbids. Allow other tokens too."
            )


def fold_seed(seed: int, index: int) -> int:
    """A number in [0, 2^31) for choice `index` of a request with this 64-bit seed."""
    message = seed.to_bytes(8, "little", signed=True) + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.sha256(message).digest()[:4], "little") & MAX_INT32
