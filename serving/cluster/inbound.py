"""A request's body at the router: bounded, in time, and whole. No jax."""

import asyncio
import logging

from starlette.types import Receive, Scope

from serving.http.errors import ApiError

logger = logging.getLogger(__name__)
_CLOSE = {"Connection": "close"}  # the rest of the body is still on its way


class ClientLeft(Exception):
    """The client has closed its connection; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """Return the whole body. Raises ApiError 408 or 413, or ClientLeft.

    A declared length that is too large is refused before a byte of the body is kept.
    """
    if _declared(scope) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, limit)
    except TimeoutError:
        raise ApiError(408, "The body took too long to arrive.", headers=_CLOSE) from None


async def _read(receive: Receive, limit: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return b"".join(parts)


def _declared(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", headers=_CLOSE)
