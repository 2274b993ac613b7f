"""Read a JSON body: in time, within the size limit, of the right type, and exactly as typed."""

import asyncio
import logging
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.errors import ApiError, from_validation

logger = logging.getLogger(__name__)


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """Return what the API's description says of a route that reads this body."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_body[Body: BaseModel](request: Request, kind: type[Body]) -> Body:
    """Return the checked body. Raises ApiError 400, 408 or 413.

    pydantic's own JSON reader does both steps, in strict mode: "1" is not 1, and NaN is nothing.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        shown = f"The body is {coding[:32]!r} encoded; send it without Content-Encoding."
        raise ApiError(415, shown, headers=_CLOSE | {"Accept-Encoding": "identity"})
    settings = request.app.state.server.settings
    raw = await _read(request, settings.max_body_bytes, settings.body_timeout_s)
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        if any(item["type"] == "json_invalid" for item in error.errors()):
            raise ApiError(400, "The body is not valid JSON.") from None
        raise from_validation(error) from None
    if body.model_extra:
        logger.debug("Ignored fields: %s", [name[:64] for name in body.model_extra])
    return body


async def _read(request: Request, limit: int, timeout_s: float) -> bytes:
    too_large = ApiError(413, f"The body is larger than {limit} bytes.", headers=_CLOSE)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, "The body took too long to arrive.", headers=_CLOSE) from None
    return b"".join(chunks)


# The rest of the body is still on its way, so the connection cannot serve another request.
_CLOSE = {"Connection": "close"}


class OneLength:
    """Refuse requests that state their length twice: a proxy may see another end than we do."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [name for name, _ in scope.get("headers", ())]
        if b"transfer-encoding" in names and b"content-length" in names:
            error = ApiError(400, "Both Content-Length and Transfer-Encoding.", headers=_CLOSE)
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)
