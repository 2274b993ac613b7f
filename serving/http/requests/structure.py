"""The answer's structure from a body: its `response_format` and `structured_outputs`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from serving.api.structured_outputs import ALWAYS, OPENED, OPTIONAL, StructuredOutputs
from serving.http.errors import ApiError, scrub
from serving.http.interface import AbstractEngine
from serving.http.lanes import Lane, run_in
from serving.http.requests.protocol import ChatBody, GenerationBody
from serving.http.requests.tools import demanded_calls
from serving.http.settings import ALWAYS_THOUGHTS, THINK_TAGS

_FIELDS = {  # of each type of response_format
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers"),
}
_WITH_SCHEMA = '{"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}'
_SCHEMA_FIELDS = ("name", "schema", "strict", "description")


def structured_outputs(body: GenerationBody) -> StructuredOutputs | None:
    """Return the structure that the body asks for, if it does; ApiError 400 names a bad field.

    A chat that demands tool calls asks for theirs.
    """
    demanded = demanded_calls(body) if isinstance(body, ChatBody) else None
    outputs = _of_body(body)
    if demanded is None:
        return outputs
    if outputs is not None:
        raise ApiError(
            400,
            "tool_choice demands a call, which response_format and structured_outputs exclude.",
            param="tool_choice",
        )
    return _checked("tools", {"json": demanded.schema})


def _of_body(body: GenerationBody) -> StructuredOutputs | None:
    given = body.response_format, body.structured_outputs
    outputs = None if given[1] is None else _checked("structured_outputs", given[1])
    if given[0] is None or (fields := _of_format(given[0])) is None:
        return outputs
    if outputs is not None:
        raise ApiError(
            400,
            "response_format and structured_outputs exclude each other.",
            param="response_format",
        )
    return _checked("response_format", fields)


def thinks_first(body: ChatBody, parser: str | None) -> bool:
    """Return whether thoughts may come before the body's structure, as in vLLM.

    They do under a reasoning parser whose tags are text, unless the body wants no thoughts.
    """
    return parser in THINK_TAGS and body.include_reasoning is not False


def after_thoughts(
    outputs: StructuredOutputs, parser: str | None, prompt: str
) -> StructuredOutputs:
    """Return the structure behind thoughts; without them where the prompt has closed them."""
    end = prompt.rstrip()
    if end.endswith("</think>"):
        return outputs
    thoughts = ALWAYS if parser == ALWAYS_THOUGHTS else OPTIONAL
    return dataclasses.replace(outputs, thoughts=OPENED if end.endswith("<think>") else thoughts)


async def compiled_grammar(
    engine: AbstractEngine, body: GenerationBody, outputs: StructuredOutputs | None
) -> Any:
    """Return the engine's grammar of the body's structure, None where nothing binds the answer.

    It is compiled off the event loop; ApiError 400 says why a structure cannot be.
    """
    if outputs is None:
        return None
    try:
        grammar = engine.grammars.find(outputs)
        return grammar or await run_in(Lane.GRAMMAR, engine.grammars.compile, outputs)
    except ValueError as error:
        is_tool = isinstance(body, ChatBody) and demanded_calls(body) is not None
        param = "response_format" if body.structured_outputs is None else "structured_outputs"
        raise _bad("tools" if is_tool else param, error) from None


def _checked(param: str, fields: Mapping[str, Any]) -> StructuredOutputs:
    try:
        return StructuredOutputs.of(fields)
    except ValueError as error:
        raise _bad(param, error) from None


def _bad(param: str, error: ValueError) -> ApiError:
    """Return the answer to a structure that cannot be, by the field that the client knows."""
    message = str(error)
    # A JSON pointer into the client's own schema looks like a path of the server.
    if "Pointer '" not in message:
        message = scrub(message)
    if param != "structured_outputs" and message.startswith("structured_outputs."):
        _, _, rest = message.partition(".")
        kind = len(rest) - len(rest.lstrip("abcdefghijklmnopqrstuvwxyz_"))
        message = f"{param}{rest[kind:]}"
    return ApiError(400, message, param=param)


def _of_format(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a response_format as fields of structured outputs, None for plain text."""
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _format_error(f"type must be one of {', '.join(_FIELDS)}")
    if kind == "json_object" and value.get("schema") is not None:  # LoRAX's way
        raise _format_error(f"schema is not supported: send {_WITH_SCHEMA}")
    _check_names("", value, ("type", *_FIELDS[kind]))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": dict(value)}
    named = value.get("json_schema")
    if not isinstance(named, Mapping):
        raise _format_error("json_schema must be an object with name and schema")
    _check_names("json_schema.", named, _SCHEMA_FIELDS)
    schema = named.get("schema")
    if not isinstance(schema, Mapping):
        raise _format_error("json_schema.schema must be an object")
    return {"json": schema}


def _check_names(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((n for n, item in value.items() if n not in known and item is not None), None)
    if unknown is not None:
        raise _format_error(f"{where}{unknown[:60]} is not supported")


def _format_error(text: str) -> ApiError:
    return ApiError(400, f"response_format.{text}.", param="response_format")
