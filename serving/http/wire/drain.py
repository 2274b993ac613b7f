"""The end of a server in good order: no new requests, time for those that run, a word to the rest.

After SIGTERM a new request gets 503 and Retry-After. What still runs when the time is over gets an
error event in its stream, or 503 where nothing of its answer was sent.
"""

import asyncio
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.http.errors import ApiError

_OPEN = ("/health", "/live", "/metrics", "/ping")
_RETRY = {"Retry-After": "5", "Connection": "close"}


class Drain:
    """Around the whole application, of one event loop."""

    def __init__(self, app: ASGIApp):
        self.app = app
        self.is_draining = False
        self.running = 0
        self._cut = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] in _OPEN and not self._cut.is_set()):
            await self.app(scope, receive, send)
            return
        if self.is_draining:
            error = ApiError(503, "The server is shutting down.", headers=_RETRY)
            await error.response()(scope, receive, send)
            return
        self.running += 1
        try:
            await self._run(scope, receive, send)
        finally:
            self.running -= 1

    async def finish(self, seconds: float) -> None:
        """Take no more requests; return when all are answered, or told that they will not be."""
        self.is_draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.running and loop.time() < end:
            await asyncio.sleep(0.02)
        self._cut.set()
        end = loop.time() + 1.0
        while self.running and loop.time() < end:
            await asyncio.sleep(0.01)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = _Sent(send)
        work = asyncio.ensure_future(self.app(scope, receive, sent))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({work, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await _abandon(work)
                await sent.end(scope, receive)
                return
            work.result()
        finally:
            cut.cancel()
            await _abandon(work)


class _Sent:
    """The way out, and what has gone through it."""

    def __init__(self, send: Send):
        self._send = send
        self.started = self.complete = self.is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self.is_stream = kind.startswith(b"text/event-stream")
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    async def end(self, scope: Scope, receive: Receive) -> None:
        """Say that there will be no (further) answer; an answer with a length is only cut off."""
        error = ApiError(503, "The server is shutting down.", headers=_RETRY)
        if not self.started:
            await error.response()(scope, receive, self._send)
        elif self.is_stream and not self.complete:
            event = b"data: " + json.dumps(error.body()).encode() + b"\n\n"
            await self._send({"type": "http.response.body", "body": event})


async def _abandon(work: asyncio.Future) -> None:
    """Cancel the work and wait until it has cleaned up."""
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # it has been seen
