"""Server-sent events: framing, keep-alive comments, errors after the 200, disconnects."""

import contextlib
import json
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.http.errors import from_exception, logger
from serving.http.generation import ClientGone, Generation, Piece

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Chunks(Protocol):
    """Turns pieces into the chunks of one kind of stream."""

    def first(self) -> list[dict[str, Any]]: ...

    def of(self, piece: Piece) -> list[dict[str, Any]]: ...

    def last(self) -> list[dict[str, Any]]: ...


def event(data: dict[str, Any]) -> bytes:
    """Return one event as it goes over the wire."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class EventStream(Response):
    """A generation as a stream; it is aborted when the client goes or sending fails."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: Chunks, keep_alive_s: float):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation, self._chunks = generation, chunks
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_bytes(data: bytes, more: bool = True) -> None:
            if data or not more:
                self._generation.is_sending = True
                await send({"type": "http.response.body", "body": data, "more_body": more})
                self._generation.is_sending = False

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send_bytes(b"".join(map(event, self._chunks.first())))
            await self._send_pieces(receive, send_bytes)
            await send_bytes(DONE, more=False)
        except (ClientGone, OSError):
            return
        finally:
            self._generation.abort()

    async def _send_pieces(self, receive: Receive, send_bytes: Any) -> None:
        pieces = self._generation.pieces(receive, self._keep_alive_s)
        try:
            async with contextlib.aclosing(pieces):
                async for batch in pieces:
                    data = b"".join(event(c) for p in batch for c in self._chunks.of(p))
                    if data or not batch:
                        await send_bytes(data or KEEP_ALIVE)
            await send_bytes(b"".join(map(event, self._chunks.last())))
        except (ClientGone, OSError):
            raise
        except Exception as error:
            answer = from_exception(error)
            if answer.status == 500:
                logger.error("A stream failed: %s", type(error).__name__)
            await send_bytes(event(answer.body()))
