"""A request's body: whole, bounded and in time. A refused one is read to its end, and not kept.

Many clients look for an answer only behind their body. If the connection ended before, they would
tell of that and not of the answer.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from serving.http.errors import ApiError

# The rest of the body may be on its way, so the connection cannot serve another request.
CLOSE = {"Connection": "close"}
_MOST_DISCARDED = 64 << 20  # bytes above the limit of a body that is read, for at most _DISCARD_S
_DISCARD_S = 2.0


async def whole_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytearray:
    """Return the body. Raises ApiError 408 or 413, or ClientDisconnect where the client leaves.

    Of a body whose declared length is too large nothing is kept.
    """
    declared, chunks = _declared(scope), _chunks(receive)
    too_large = ApiError(413, f"The body is larger than {limit} bytes.", headers=CLOSE)
    if declared > limit:
        if declared <= limit + _MOST_DISCARDED and not _waits(scope):
            await _discard(chunks)
        raise too_large
    body = bytearray()  # chunks that are joined at the end hold up the event loop
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in chunks:
                if len(body) + len(chunk) > limit:
                    break
                body += chunk
            else:
                return body
    except TimeoutError:
        raise ApiError(408, "The body took too long to arrive.", headers=CLOSE) from None
    await _discard(chunks)
    raise too_large


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def _discard(chunks: AsyncIterator[bytes]) -> None:
    """Read the rest, within bounds; a client that goes on sending sees the connection end."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            async for chunk in chunks:
                size += len(chunk)
                if size > _MOST_DISCARDED:
                    return


def _declared(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _waits(scope: Scope) -> bool:
    """Return whether the client sends nothing before the server asks for it, or answers."""
    return any(name == b"expect" for name, _ in scope["headers"])
