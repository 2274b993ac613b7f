"""The OpenAI routes in front of several instances: each request goes to one of them. No jax.

Keys, bodies and errors are the instances' business; here a request is only read for the name of its
model. What changes adapters goes to all instances.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from serving.cluster.metrics import merge
from serving.cluster.router import Router
from serving.cluster.upstream import Headers, Upstream, UpstreamDown, send
from serving.http.errors import ApiError

logger = logging.getLogger(__name__)

_TO_ALL = {
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/load_lora_adapter"),
    ("POST", "/unload_lora_adapter"),
    ("POST", "/v1/loras"),
}
_MOST_BYTES = 16 << 20  # of a body; the instances have their own limit
_BODY_S = 30.0  # for a whole body to arrive
_RETRY_S = "1"
_DEFAULT_TOKENS = 16.0


class Proxy:
    """An ASGI application over the sockets of the instances."""

    def __init__(self, paths: Sequence[str], router: Router, base_names: Sequence[str]):
        """`base_names` are those of the base model; every other one is an adapter's."""
        self._paths, self._router = list(paths), router
        self._base_names = frozenset(base_names)

    async def __call__(self, scope: Scope, receive: Receive, send_: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send_)
            return
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send_)
        except ApiError as error:
            await error.response()(scope, receive, send_)

    async def _answer(self, scope: Scope, receive: Receive, send_: Send) -> None:
        body = await _body(receive)
        path, method = scope["path"], scope["method"]
        if path == "/metrics" and method == "GET":
            await self._metrics(scope, send_)
        elif (method, path) in _TO_ALL or (method == "DELETE" and path.startswith("/v1/loras/")):
            await self._to_all(scope, body, send_)
        else:
            await self._to_one(scope, body, receive, send_)

    async def _to_one(self, scope: Scope, body: bytes, receive: Receive, send_: Send) -> None:
        """Pass the request on, to another instance if one is down, and stream the answer."""
        adapter, load = self._model_of(body)
        tried: list[int] = []
        while len(tried) < len(self._paths):
            instance = self._router.choose(adapter, load, tried)
            try:
                upstream = await send(self._paths[instance], *_parts(scope), body)
            except UpstreamDown as error:
                logger.warning("Instance %d is down: %s", instance, error)
                self._router.set_up(instance, False)
                tried.append(instance)
                continue
            else:
                await _stream(upstream, receive, send_)
                return
            finally:
                self._router.done(instance)
        raise _nobody()

    async def _to_all(self, scope: Scope, body: bytes, send_: Send) -> None:
        """Let every instance do the same; the answer is the first that is no success, or one."""
        answers = await self._everywhere(scope, body)
        if not answers:
            raise _nobody()
        status, headers, content = next((a for a in answers if a[0] >= 300), answers[0])
        await _send_whole(send_, status, headers, content)

    async def _metrics(self, scope: Scope, send_: Send) -> None:
        answers = await self._everywhere(scope, b"")
        bad = next((answer for answer in answers if answer[0] != 200), None)
        if bad is not None or not answers:
            if bad is None:
                raise _nobody()
            await _send_whole(send_, *bad)
            return
        text = merge({str(n): content.decode() for n, (_, _, content) in enumerate(answers)})
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        await _send_whole(send_, 200, headers, text.encode())

    async def _everywhere(self, scope: Scope, body: bytes) -> list[tuple[int, Headers, bytes]]:
        """Return the answers of the instances that are there."""

        async def one(path: str) -> tuple[int, Headers, bytes] | None:
            try:
                upstream = await send(path, *_parts(scope), body)
            except UpstreamDown:
                return None
            try:
                content = b"".join([part async for part in upstream.body()])
            finally:
                upstream.close()
            return upstream.status, upstream.headers, content

        found = await asyncio.gather(*(one(path) for path in self._paths))
        return [answer for answer in found if answer is not None]

    def _model_of(self, body: bytes) -> tuple[str | None, float]:
        """Return the adapter that a body names, None for the base model, and its load in tokens."""
        try:
            said: Any = json.loads(body) if body else {}
        except ValueError:
            return None, 0.0
        if not isinstance(said, dict):
            return None, 0.0
        model, tokens = said.get("model"), said.get("max_tokens")
        if not isinstance(model, str) or model in self._base_names:
            return None, 0.0
        if not isinstance(tokens, int | float) or not 0 < tokens < 1e9:
            tokens = _DEFAULT_TOKENS
        return model, float(tokens)


def _nobody() -> ApiError:
    return ApiError(503, "No instance is there now.", headers={"Retry-After": _RETRY_S})


def _parts(scope: Scope) -> tuple[str, bytes, Headers]:
    query = scope.get("query_string", b"")
    target = scope.get("raw_path") or scope["path"].encode()
    return scope["method"], target + (b"?" + query if query else b""), scope["headers"]


async def _body(receive: Receive) -> bytes:
    """Return the whole body; ApiError when it is too long or does not come."""
    try:
        async with asyncio.timeout(_BODY_S):
            return await _read(receive)
    except TimeoutError:
        close = {"Connection": "close"}
        raise ApiError(408, "The body took too long to arrive.", headers=close) from None


async def _read(receive: Receive) -> bytes:
    """Return the whole body; ApiError when it is too long."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(408, "The client has gone.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _MOST_BYTES:
            raise ApiError(413, f"The body is longer than {_MOST_BYTES} bytes.")
        more = message.get("more_body", False)
    return b"".join(parts)


async def _stream(upstream: Upstream, receive: Receive, send_: Send) -> None:
    """Pass an answer on until it ends or the client goes, which ends it at the instance too."""
    gone = asyncio.create_task(_disconnected(receive))
    passing = asyncio.create_task(_pass_on(upstream, send_))
    try:
        await asyncio.wait({gone, passing}, return_when=asyncio.FIRST_COMPLETED)
        if passing.done():
            passing.result()
    finally:
        gone.cancel()
        passing.cancel()
        upstream.close()


async def _pass_on(upstream: Upstream, send_: Send) -> None:
    start: Message = {"type": "http.response.start", "status": upstream.status}
    await send_(start | {"headers": upstream.headers})
    async for part in upstream.body():
        await send_({"type": "http.response.body", "body": part, "more_body": True})
    await send_({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(send_: Send, status: int, headers: Headers, content: bytes) -> None:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    kept.append((b"content-length", str(len(content)).encode()))
    await send_({"type": "http.response.start", "status": status, "headers": kept})
    await send_({"type": "http.response.body", "body": content})


async def _lifespan(receive: Receive, send_: Send) -> None:
    while True:
        message = await receive()
        await send_({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
