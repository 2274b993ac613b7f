"""An instance's answer on its way to the client. No jax.

An answer with a length is read whole before its head goes out, so that an instance that ends
meanwhile costs a retry or a plain 503. A stream that is cut off ends with an error event.
"""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from serving.cluster.upstream import Headers, Upstream, UpstreamBroken
from serving.http.errors import ApiError

_WHOLE = 64 << 20  # bytes of an answer that is read before it is passed on
_CUT_OFF = "The instance ended while it answered."


async def relay(upstream: Upstream, receive: Receive, send_: Send) -> None:
    """Pass the answer on and close it. Raises UpstreamBroken before anything was passed on.

    Raises ClientDisconnect when the client goes, which ends the request at the instance too.
    """
    try:
        length = _value(upstream.headers, b"content-length")
        if length.isdigit() and int(length[:20]) <= _WHOLE:
            content = await while_there(upstream.whole(), receive)
            await send_whole(send_, upstream.status, upstream.headers, content)
        else:
            await while_there(_pass_on(upstream, send_), receive)
    finally:
        await upstream.close()


async def while_there[Result](work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Return what the work returns; cancel it and raise ClientDisconnect when the client goes."""
    gone = asyncio.create_task(_disconnected(receive))
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({gone, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait({gone, working})  # before the socket that they read is closed


async def send_whole(send_: Send, status: int, headers: Headers, content: bytes) -> None:
    """Send an answer whose body is known."""
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    kept.append((b"content-length", str(len(content)).encode()))
    await send_({"type": "http.response.start", "status": status, "headers": kept})
    await send_({"type": "http.response.body", "body": content})


async def _pass_on(upstream: Upstream, send_: Send) -> None:
    start: Message = {"type": "http.response.start", "status": upstream.status}
    await send_(start | {"headers": upstream.headers})
    try:
        async for part in upstream.body():
            await send_({"type": "http.response.body", "body": part, "more_body": True})
    except UpstreamBroken:
        if not _value(upstream.headers, b"content-type").startswith(b"text/event-stream"):
            raise ConnectionAbortedError(_CUT_OFF) from None
        await send_({"type": "http.response.body", "body": error_event(ApiError(503, _CUT_OFF))})
        raise ConnectionAbortedError(_CUT_OFF) from None
    await send_({"type": "http.response.body", "body": b""})


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream without [DONE]."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _value(headers: Headers, wanted: bytes) -> bytes:
    return next((value for name, value in headers if name.lower() == wanted), b"")
