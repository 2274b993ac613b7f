"""Server-sent events: framing, keep-alive comments, errors after the 200, disconnects."""

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.http.answers.event_writer import EventWriter, event
from serving.http.answers.generation import ClientGone, Generation, Piece
from serving.http.answers.json_pieces import text_json
from serving.http.errors import ApiError, after_checks
from serving.http.lanes import Lane, run_in
from serving.http.wire.body_writer import BodyWriter, body_writer

DONE = b"data: [DONE]\n\n"
_SHORT = 1024  # prompt tokens whose log-probabilities are written on the event loop
KEEP_ALIVE = b": keep-alive\n\n"


class Chunks(Protocol):
    """Turns pieces into the chunks of one kind of stream."""

    def first(self) -> list[dict[str, Any]]: ...

    def of(self, piece: Piece) -> list[dict[str, Any]]: ...

    def text_of_plain(self, piece: Piece) -> str | None: ...

    def last(self) -> list[dict[str, Any]]: ...

    def failed(self, error: ApiError) -> list[dict[str, Any]]: ...


class EventStream(Response):
    """A generation as a stream; it is aborted when the client goes or sending fails."""

    media_type = "text/event-stream"
    end = DONE
    _body: BodyWriter | None = None

    def __init__(
        self,
        generation: Generation,
        chunks: Chunks,
        keep_alive_s: float,
        headers: Mapping[str, str] | None = None,
    ):
        always = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**always, **(headers or {})})
        del self.headers["content-length"]
        self._generation, self._chunks = generation, chunks
        self._keep_alive_s, self._writer = keep_alive_s, EventWriter()

    def frame(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as it goes over the wire."""
        return self._writer.event(chunk)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._body = body_writer(scope)

        async def send_bytes(data: bytes, more: bool = True) -> None:
            if data or not more:
                self._generation.is_sending = True
                await send({"type": "http.response.body", "body": data, "more_body": more})
                self._generation.is_sending = False

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send_bytes(b"".join(map(self.frame, self._chunks.first())))
            await self._send_pieces(receive, send_bytes)
            await send_bytes(self.end, more=False)
        except (ClientGone, OSError):
            return
        finally:
            self._generation.abort()

    async def _events(self, batch: list[Piece]) -> bytes:
        """Return the events of some pieces; those with a long prompt are made in a thread."""
        if sum(len(piece.delta.prompt_logprobs or ()) for piece in batch) <= _SHORT:
            return self._encode(batch)
        return await run_in(Lane.LONG, lambda: self._encode(batch))

    def _encode(self, batch: list[Piece]) -> bytes:
        """Return the events of some pieces."""
        chunks, events = self._chunks, []
        for piece in batch:
            around = self._writer.around(piece.index)
            text = None if around is None else chunks.text_of_plain(piece)
            if text is None or around is None:
                events += map(self.frame, chunks.of(piece))
            elif text:
                events.append(text_json(text).join(around))
        return b"".join(events)

    def _write_now(self, batch: list[Piece]) -> bool:
        """Send the events of some pieces; False where that may have to wait."""
        if self._body is None or not self._body.is_ready:
            return False
        if data := self._encode(batch):
            self._body.write(data)
        return True

    async def _send_pieces(self, receive: Receive, send_bytes: Any) -> None:
        pieces = self._generation.pieces(receive, self._keep_alive_s, self._write_now)
        try:
            with after_checks(ClientGone, OSError):
                async with contextlib.aclosing(pieces):
                    async for batch in pieces:
                        data = await self._events(batch)
                        if data or not batch:
                            await send_bytes(data or KEEP_ALIVE)
                await send_bytes(b"".join(map(self.frame, self._chunks.last())))
        except ApiError as error:
            await send_bytes(b"".join(map(self.frame, self._chunks.failed(error))))


class NamedEventStream(EventStream):
    """A stream whose events have names and which ends with the last of them."""

    end = b""

    def frame(self, chunk: dict[str, Any]) -> bytes:
        return b"event: %b\n%b" % (chunk["type"].encode(), event(chunk))
