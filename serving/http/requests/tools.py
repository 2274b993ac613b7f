"""Tools of a chat: what the template shows, and the grammar of a call that the body demands."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from serving.http.errors import ApiError
from serving.http.requests.protocol import ChatBody

MAX_TOOLS = 128
_MAX_NAME = 64  # characters


@dataclasses.dataclass(frozen=True)
class DemandedCalls:
    """Calls that an answer must be: of the one function `name`, or ("") of any, one or more."""

    name: str
    schema: Mapping[str, Any]


def template_tools(body: ChatBody) -> dict[str, Any]:
    """Return the chat template's variables for the body's tools, none without tools."""
    tools = _tools(body)
    return {"tools": tools} if tools else {}


def demanded_calls(body: ChatBody) -> DemandedCalls | None:
    """Return the calls that tool_choice demands, None where the model may answer with text.

    ApiError 400 for tools without a name, and for a choice that is not among them.
    """
    tools, choice = _tools(body), body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    functions = [tool["function"] for tool in tools]
    if choice == "required":
        if not functions:
            raise _error("tool_choice", "'required' needs tools")
        return DemandedCalls("", _any_call(functions, body.parallel_tool_calls is not False))
    if not isinstance(choice, Mapping) or not isinstance(choice.get("function"), Mapping):
        raise _error("tool_choice", "must be 'none', 'auto', 'required' or a function")
    name = choice["function"].get("name")
    function = next((f for f in functions if f["name"] == name), None)
    if function is None:
        raise _error(
            "tool_choice", f"names {str(name)[:_MAX_NAME]!r}, which is not among the tools"
        )
    return DemandedCalls(function["name"], _parameters(function))


def auto_parser(body: ChatBody, parser: str | None) -> str | None:
    """Return the server's parser if the model may call the body's tools by itself.

    ApiError 400 where the server has none, and where a structure binds the answer.
    """
    if not _tools(body) or body.tool_choice not in (None, "auto"):
        return None
    if parser is None:
        raise _error(
            "tool_choice",
            "'auto' needs a server with --enable-auto-tool-choice and --tool-call-parser; use "
            "'required', 'none' or a function",
        )
    kind = None if body.response_format is None else body.response_format.get("type")
    if body.structured_outputs is not None or kind not in (None, "text"):
        raise _error(
            "tool_choice", "'auto' and response_format or structured_outputs exclude each other"
        )
    return parser


def template_calls(index: int, given: Any) -> list[dict[str, Any]]:
    """Return an earlier message's tool calls as templates take them: arguments as an object."""
    where = f"messages.{index}.tool_calls"
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise _error("messages", f"{where} must be a list of at most {MAX_TOOLS} calls", whole=True)
    calls = []
    for call in given:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _error("messages", f"{where} must have functions with names", whole=True)
        arguments = function.get("arguments")
        try:
            read = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            read = arguments  # a template shows it as it is
        function = {"name": function["name"], "arguments": {} if read is None else read}
        calls.append({"id": call.get("id"), "type": "function", "function": function})
    return calls


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise _error("tools", f"must have at most {MAX_TOOLS} entries, got {len(tools)}")
    names = set()
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise _error("tools", f"{index} must be of type function and have a function")
        name = function.get("name")
        if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME:
            raise _error("tools", f"{index}.function.name must have 1 to {_MAX_NAME} characters")
        if name in names:
            raise _error("tools", f"has two functions of the name {name!r}")
        names.add(name)
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise _error("tools", f"{index}.function.parameters must be a schema of an object")
    return tools


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    given = function.get("parameters")
    return {"type": "object", **given} if given else {"type": "object", "maxProperties": 0}


def _any_call(functions: list[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls; definitions of the functions' schemas move to it."""
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        schema = dict(_parameters(function))
        for key, value in (schema.pop("$defs", None) or {}).items():
            if definitions.setdefault(key, value) != value:
                raise _error("tools", f"has two definitions of {key[:_MAX_NAME]!r} in $defs")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    schema |= {} if parallel else {"maxItems": 1}
    return schema | ({"$defs": definitions} if definitions else {})


def _error(param: str, text: str, *, whole: bool = False) -> ApiError:
    joined = text if whole else f"{param} {text}" if not text[0].isdigit() else f"{param}.{text}"
    return ApiError(400, f"{joined}.", param=param)
