"""Converts a request body to `Sampling`; errors name the body's own fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from serving.api.sampling import Sampling
from serving.http.errors import ApiError, scrub
from serving.http.requests.protocol import ChatBody, CompletionBody, GenerationBody
from serving.http.requests.refused_fields import check_fields
from serving.http.requests.structure import structured_outputs

_COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
)
DEFAULT_COMPLETION_TOKENS = 16


def completion_sampling(body: CompletionBody, room: int, defaults: Mapping[str, Any]) -> Sampling:
    """Return how a completion's tokens are chosen; max_tokens still without the context's limit.

    What the body does not set is as in `defaults`, but for max_tokens: the API says 16. A
    max_tokens that is null is as in a chat, which is vLLM's rule.
    """
    values = _common(body, defaults)
    values["logprobs"] = body.logprobs
    values["echo"] = bool(body.echo)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        values["prompt_logprobs"] = body.logprobs
    values["max_tokens"] = _asked(body)
    if values["max_tokens"] is None:
        is_null = "max_tokens" in body.model_fields_set
        values["max_tokens"] = _most(room, defaults) if is_null else DEFAULT_COMPLETION_TOKENS
    return _build(body, values, {})


def chat_sampling(body: ChatBody, room: int, defaults: Mapping[str, Any]) -> Sampling:
    """Return how a chat answer's tokens are chosen.

    What the body does not set is as in `defaults`; without max_tokens there either, it may fill
    the context.
    """
    values = _common(body, defaults)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "When top_logprobs is set, logprobs must be true.", param="top_logprobs"
        )
    values["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    values["max_tokens"] = _most(room, defaults) if _asked(body) is None else _asked(body)
    return _build(body, values, {"logprobs": "top_logprobs"})


def _most(room: int, defaults: Mapping[str, Any]) -> int:
    """Return max_tokens of an answer that may be as long as the server lets it."""
    return defaults.get("max_tokens", max(room, 1))


def _asked(body: GenerationBody) -> int | None:
    """Return how many tokens the client asked for."""
    newer = body.max_completion_tokens
    return body.max_tokens if newer is None else newer


def _common(body: GenerationBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    check_fields(body)
    if body.best_of is not None and body.best_of not in (1, body.n or 1):
        raise ApiError(
            400,
            "best_of is not supported other than equal to n: send n, and compare the answers' "
            "logprobs.",
            param="best_of",
        )
    if body.stream_options and body.stream_options.model_fields_set and not body.stream:
        raise ApiError(
            400,
            "stream_options can only be set with stream: true.",
            param="stream_options",
        )
    given = {f: getattr(body, f) for f in _COPIED if getattr(body, f) is not None}
    values = {**defaults, **given}
    values["structured_outputs"] = structured_outputs(body)
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    return values


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ApiError(400, "logit_bias keys must be token ids.", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _build(body: GenerationBody, values: dict[str, Any], renamed: dict[str, str]) -> Sampling:
    if body.max_completion_tokens is not None:
        renamed = renamed | {"max_tokens": "max_completion_tokens"}
    try:
        return Sampling(**values)
    except ValueError as error:
        field, space, rest = scrub(str(error)).partition(" ")
        name = renamed.get(field, field)
        is_field = name.partition("[")[0] in type(body).model_fields
        param = name.partition("[")[0] if is_field else None
        raise ApiError(400, name + space + rest, param=param) from None


def fit_context(
    sampling: Sampling, body: GenerationBody, length: int, limit: int, most: int | None = None
) -> Sampling:
    """Return the sampling for a prompt of `length` tokens in a context of `limit`.

    A prompt that leaves no room, and more max_tokens than there is room for, are ApiError 400; a
    default that is too large is cut instead, and so is what exceeds the server's bound `most`.
    """
    room = limit - length
    if room < min(sampling.max_tokens, 1):
        raise ApiError(
            400,
            f"Input length ({length}) exceeds model's maximum context length ({limit}).",
            param="messages" if isinstance(body, ChatBody) else "prompt",
        )
    if sampling.max_tokens <= room:
        return _at_most(sampling, most)
    if _asked(body) is None:
        return _at_most(sampling, room if most is None else min(room, most))
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    raise ApiError(
        400,
        f"{name} is too large: {sampling.max_tokens}. The model's maximum context length is "
        f"{limit} tokens and the request has {length} input tokens.",
        param=name,
    )


def _at_most(sampling: Sampling, tokens: int | None) -> Sampling:
    if tokens is None or sampling.max_tokens <= tokens:
        return sampling
    shortest = min(sampling.min_tokens, tokens)
    return dataclasses.replace(sampling, max_tokens=tokens, min_tokens=shortest)
