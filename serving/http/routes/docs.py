"""GET /docs: routes and fields as one page, made of the OpenAPI description; it loads nothing."""

import html
import json
import re
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
        f"<p>{html.escape(description['info'].get('description', ''))}</p>",
    ]
    bodies: list[str] = []
    for path, methods in sorted(description["paths"].items()):
        for method, details in sorted(methods.items()):
            text = html.escape(details.get("description", ""))
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{text}</p>")
            bodies.append(_body(details))
            parts.append(_fields(bodies[-1], schemas))
    for name in _parts_of(bodies, schemas):
        parts.append(f"<h2>{html.escape(name)}</h2>{_fields(name, schemas)}")
    return "\n".join(part for part in parts if part) + "</html>\n"


def _body(details: dict[str, Any]) -> str:
    """Return the name of a route's body, "" where it has none."""
    content = details.get("requestBody", {}).get("content", {}).get("application/json", {})
    return content.get("schema", {}).get("$ref", "").rpartition("/")[2]


def _parts_of(bodies: list[str], schemas: dict[str, Any]) -> list[str]:
    """Return the names of the objects that fields of the bodies hold, in order."""
    found: list[str] = []
    left = list(bodies)
    while left:
        fields = schemas.get(left.pop(), {}).get("properties", {})
        names = re.findall(r"#/components/schemas/(\w+)", json.dumps(fields))
        new = [name for name in dict.fromkeys(names) if name not in (*found, *bodies)]
        found += new
        left += new
    return sorted(found)


def _fields(name: str, schemas: dict[str, Any]) -> str:
    """Return a table of the fields of an object, "" where it has none."""
    schema = schemas.get(name, {})
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{html.escape(field)}</code></td><td>{html.escape(_kind(kind))}"
        f"{', required' if field in required else ''}</td></tr>"
        for field, kind in schema.get("properties", {}).items()
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
