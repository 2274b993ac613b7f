"""GET /docs: routes and fields as one page, made of the OpenAPI description; it loads nothing."""

import html
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

router = APIRouter()
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/docs", include_in_schema=False)
def docs(request: Request) -> Response:
    """Return the page."""
    media_type = "text/html; charset=utf-8"
    return Response(page(request.app.openapi()), media_type=media_type, headers=_HEADERS)


def page(description: dict[str, Any]) -> str:
    """Return the page for an OpenAPI description."""
    schemas = description.get("components", {}).get("schemas", {})
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>lora-jax: routes</title>",
        "<h1>Routes</h1><p>As OpenAPI: <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, methods in sorted(description["paths"].items()):
        for method, details in sorted(methods.items()):
            text = html.escape(details.get("description", ""))
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{text}</p>")
            parts.append(_fields(details, schemas))
    return "\n".join(part for part in parts if part) + "</html>\n"


def _fields(details: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return a table of the fields of a route's body, "" where it has none."""
    content = details.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    fields = schemas.get(name, {}).get("properties", {})
    rows = "".join(
        f"<tr><td><code>{html.escape(field)}</code></td><td>{html.escape(_kind(schema))}</td></tr>"
        for field, schema in fields.items()
    )
    return f"<table><tr><th>field</th><th>type</th></tr>{rows}</table>" if rows else ""


def _kind(schema: dict[str, Any]) -> str:
    """Return what a field may hold, null left out: every field may be null."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(k for k in map(_kind, schema["anyOf"]) if k != "null"))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return schema.get("type", "any")
