"""Requests and answers between an agent and its functions, as JSON. No jax.

Nothing that comes in is executed or unpickled: a call names one of a few functions, with numbers
and text as arguments.
"""

import dataclasses
from typing import Any

from serving.api.outputs import BadRequest, Completion, RequestFailed, RequestOutput
from serving.api.request import FinishReason, TokenLogprobs
from serving.api.sampling import Sampling
from serving.http.settings import HttpSettings

_OF_REQUESTS = (BadRequest, ValueError, TypeError, KeyError)  # the first that fits is sent


class DeviceFull(ConnectionError):
    """There is no room for a process or an adapter now; a later call tries again."""


def error_fields(error: Exception) -> dict[str, Any]:
    """Return what an agent is told of a call that failed."""
    is_lost = isinstance(error, ConnectionError)  # of this process and a third one
    is_busy = hasattr(error, "retry_after_s")  # QueueFull, and an AdapterRejected for want of room
    kinds = (kind.__name__ for kind in _OF_REQUESTS if isinstance(error, kind) and not is_busy)
    kind = next(kinds, type(error).__name__)
    return {
        "error": kind,
        "text": str(error),
        "busy": is_busy,
        "retryable": is_lost or is_busy or getattr(error, "retryable", False),
    }


def error_of(fields: dict[str, Any]) -> Exception:
    """Return the exception of `error_fields`: the request's kind, else RequestFailed."""
    kinds = {kind.__name__: kind for kind in _OF_REQUESTS}
    if (kind := kinds.get(fields["error"])) is not None:
        return kind(fields["text"])
    return RequestFailed(fields["text"], retryable=fields["retryable"])


def value_of_start(name: str, process: str, answer: dict[str, Any] | None) -> Any:
    """Return the value of a process' answer to a call that is part of a function's start.

    `process` is a text for errors; `answer` is None where that process had ended before. Raises
    ValueError where another try ends the same way, DeviceFull where there is no room now, another
    ConnectionError where another try may do.
    """
    if answer is None or answer.get("error") == "FunctionDied":
        raise ConnectionError(f"{process} ended while a function started.")
    if "error" in answer:
        text = f"Function {name!r} cannot start: {answer['text']}"
        if answer.get("busy"):
            raise DeviceFull(text)
        raise ConnectionError(text) if answer.get("retryable") else ValueError(text)
    return answer["value"]


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields that are not the default's. ValueError for structured outputs."""
    if sampling.structured_outputs is not None:
        raise ValueError(
            "structured_outputs do not work in a function over a shared backbone yet: leave them "
            "out, or use an engine of its own."
        )
    default = Sampling()
    fields = _shallow(sampling)
    changed = {name: v for name, v in fields.items() if v != getattr(default, name)}
    if sampling.logit_bias:
        changed["logit_bias"] = list(sampling.logit_bias.items())
    return changed


def sampling_of(fields: dict[str, Any]) -> Sampling:
    """Return the sampling of `sampling_fields`. Raises ValueError and TypeError for others."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): float(bias) for token, bias in values["logit_bias"]}
    return Sampling(**values)


# Of the settings of HTTP, those that an answer depends on. Keys and limits stay with the front.
_HTTP = (
    "served_names",
    "response_role",
    "default_template_kwargs",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
    "tokens_as_ids",
    "force_include_usage",
    "log_requests",
    "max_body_bytes",
    "body_timeout_s",
    "keep_alive_s",
)


def http_fields(settings: HttpSettings) -> dict[str, Any]:
    """Return what a function needs to know of the settings; no key is among it."""
    return {name: getattr(settings, name) for name in _HTTP}


def http_of(fields: dict[str, Any]) -> HttpSettings:
    """Return the settings of `http_fields`, for a server behind a front."""
    names: dict[str, Any] = {"served_names": tuple(fields["served_names"])}
    return HttpSettings(**fields | names, docs=False, is_behind_front=True)


def output_fields(output: RequestOutput) -> dict[str, Any]:
    """Return an answer as JSON takes it."""
    fields = _shallow(output)
    fields["outputs"] = [
        _shallow(choice) | {"logprobs": [_logprobs_fields(e) for e in choice.logprobs]}
        for choice in output.outputs
    ]
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [e and _logprobs_fields(e) for e in output.prompt_logprobs]
    return fields


def output_of(fields: dict[str, Any]) -> RequestOutput:
    """Return the answer of `output_fields`."""
    given = fields["prompt_logprobs"]
    changed = {
        "prompt_ids": tuple(fields["prompt_ids"]),
        "outputs": tuple(_completion_of(choice) for choice in fields["outputs"]),
        "prompt_logprobs": given and tuple(e and _logprobs_of(e) for e in given),
    }
    return RequestOutput(**fields | changed)


def _shallow(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _logprobs_fields(entry: TokenLogprobs) -> list[Any]:
    return [entry.token_id, entry.logprob, entry.rank, list(entry.top.items())]


def _logprobs_of(values: list[Any]) -> TokenLogprobs:
    token_id, logprob, rank, top = values
    return TokenLogprobs(token_id, logprob, rank, {int(token): value for token, value in top})


def _completion_of(fields: dict[str, Any]) -> Completion:
    reason = fields["finish_reason"]
    changed = {
        "token_ids": tuple(fields["token_ids"]),
        "finish_reason": reason and FinishReason(reason),
        "logprobs": tuple(_logprobs_of(entry) for entry in fields["logprobs"]),
    }
    return Completion(**fields | changed)
