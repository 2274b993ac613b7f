"""Additions to FastAPI's /openapi.json: bodies that routes read, and errors."""

from typing import Any

from fastapi import FastAPI

from serving.http.access.observe import STREAMING
from serving.http.errors import TYPES
from serving.http.requests.protocol import body_schemas

_ALWAYS = (401, 429)  # of the key and its rate
_WITH_BODY = (400, 403, 404, 408, 413, 415, 503)
_WITH_NAME = (400, 403, 404)
_SGLANG = ("/load_lora_adapter", "/unload_lora_adapter")  # their errors have SGLang's form
_CHECKS = ("/health", "/ping", "/ready")  # which may answer that the server is not well
_ROLLOUTS = "/v1/adapters/{name}/roll"
ABOUT = (
    "The field model of a request names the base model or an adapter; GET /v1/models lists them. "
    "A server with keys wants the header Authorization: Bearer KEY."
)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description of an application; it is made once."""
    if not app.openapi_schema:
        schema = FastAPI.openapi(app)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(body_schemas())
        schemas["Error"] = _ERROR
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                _add_errors(path, operation)
    return app.openapi_schema or {}


def _add_errors(path: str, operation: dict[str, Any]) -> None:
    """Say which errors an operation has. FastAPI's 422 is not one of them."""
    responses = operation["responses"]
    responses.pop("422", None)
    statuses = {*_ALWAYS, *(_WITH_BODY if "requestBody" in operation else ())}
    statuses |= {*(_WITH_NAME if operation.get("parameters") else ())}
    statuses |= {503} if path in _CHECKS or path.startswith(_ROLLOUTS) else set()
    statuses |= {409} if path.endswith("/rollback") else set()
    form = {} if path in _SGLANG else {"$ref": "#/components/schemas/Error"}
    for status in sorted(statuses):
        content = {"application/json": {"schema": form}}
        responses[str(status)] = {"description": TYPES[status], "content": content}
    if path in STREAMING:
        responses["200"]["content"]["text/event-stream"] = {"schema": {}}
