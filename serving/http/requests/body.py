"""Read a JSON body: whole, of the right type, and exactly as typed."""

import itertools
import logging
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from lora_jax.json_structure import too_many_values
from serving.http.errors import ApiError, from_validation, json_error
from serving.http.lanes import Lane, run_in
from serving.http.requests.bounds import SMALL_BODY, Bounds
from serving.http.requests.long_images import read_with_images
from serving.http.requests.protocol import NAMES_ONLY
from serving.http.wire.whole_body import CLOSE, whole_body

logger = logging.getLogger(__name__)
_LARGE = 1 << 20  # bytes of a body that the event loop does not read itself
_SHOWN = 16  # names of ignored fields in the log


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
        shown = "Unsupported Media Type: Only 'application/json' is allowed; send the header "
        raise ApiError(400, f"{shown}Content-Type: application/json.")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        shown = f"The body is {coding[:32]!r} encoded; send it without Content-Encoding."
        raise ApiError(415, shown, headers=CLOSE | {"Accept-Encoding": "identity"})
    server = request.app.state.server
    settings, bounds = server.settings, Bounds.of(server.engine)
    limit = settings.max_body_bytes or bounds.body_bytes
    if kind in NAMES_ONLY:
        limit = min(limit, SMALL_BODY)
    raw = await whole_body(request.scope, request.receive, limit, settings.body_timeout_s)
    if len(raw) >= bounds.values and await run_in(Lane.SHORT, too_many_values, raw, bounds.values):
        raise ApiError(413, f"The body holds more than {bounds.values} JSON values.")
    if len(raw) < _LARGE:
        body = _checked(kind, raw)
    else:  # one after the other, and other requests between them
        body = await run_in(Lane.BODIES, _checked_large, kind, raw)
    if body.model_extra and logger.isEnabledFor(logging.DEBUG):
        shown = itertools.islice(body.model_extra, _SHOWN)
        logger.debug("Ignored fields: %s", [name[:64] for name in shown])
    return body


def _checked[Body: BaseModel](kind: type[Body], raw: bytearray) -> Body:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise (json_error(error) or from_validation(error)) from None


def _checked_large[Body: BaseModel](kind: type[Body], raw: bytearray) -> Body:
    body = read_with_images(kind, raw)
    return _checked(kind, raw) if body is None else body


class OneLength:
    """Refuse requests that state their length twice: a proxy may see another end than we do."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [name for name, _ in scope.get("headers", ())]
        if b"transfer-encoding" in names and b"content-length" in names:
            error = ApiError(400, "Both Content-Length and Transfer-Encoding.", headers=CLOSE)
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)
