"""Every front of several engines: bodies within bounds, limits of keys, ends of clients. No jax."""

import abc
import contextlib
import dataclasses
import logging

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.request import Share
from serving.cluster.key_ledger import KeyLedger
from serving.cluster.peek import sequences
from serving.cluster.relay import while_there
from serving.cluster.suspects import Suspects
from serving.http.access.observe import GENERATING
from serving.http.errors import ApiError
from serving.http.wire.whole_body import whole_body

logger = logging.getLogger(__name__)

PROBES = ("/health", "/ready", "/live", "/ping")
METRICS = ("/metrics", "/metrics/")
RETRY_S = "1"
SHORT_S = 60.0  # for the head of an answer that is no generation
METRICS_S = 2.0  # for the metrics of an engine


@dataclasses.dataclass(frozen=True)
class BodyLimits:
    """Of a request's body."""

    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 30.0


class AbstractFront(abc.ABC):
    """An ASGI application that passes requests on; keys were checked before."""

    def __init__(self, limits: BodyLimits | None = None):
        self._limits = limits or BodyLimits()
        self._suspects = Suspects()
        self._ledger = KeyLedger()

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
        except ClientDisconnect:
            logger.info("A client left before it was answered.")
        except ConnectionAbortedError as error:
            logger.warning("A stream was cut off: %s", error)

    async def _answer(self, scope: Scope, receive: Receive, send_: Send) -> None:
        path, method = scope["path"], scope["method"]
        if (path in PROBES and method in ("GET", "HEAD")) or (path, method) == ("/ping", "POST"):
            await self._health(path)(scope, receive, send_)
            return
        limits = self._limits
        bounds = limits.max_body_bytes, limits.body_timeout_s
        body = bytes(await whole_body(scope, receive, *bounds))
        if await self._answer_here(scope, body, receive, send_):
            return
        caller = scope.get("state", {}).get("caller")
        share = Share() if caller is None else caller.share
        count = sequences(body) if path in GENERATING and share.max_running else 0
        async with contextlib.AsyncExitStack() as stack:
            if count:
                room = stack.enter_async_context(self._ledger.room(share, count))
                await while_there(room, receive)
            await self._to_one(scope, body, receive, send_)

    @abc.abstractmethod
    def _health(self, path: str) -> Response:
        """Return the answer to a probe; nothing is asked, so it never waits."""

    @abc.abstractmethod
    async def _answer_here(self, scope: Scope, body: bytes, receive: Receive, send_: Send) -> bool:
        """Answer what is not for one engine; return whether it was. May raise ApiError."""

    @abc.abstractmethod
    async def _to_one(self, scope: Scope, body: bytes, receive: Receive, send_: Send) -> None:
        """Pass the request on to one engine, and its answer back. May raise ApiError."""


async def _lifespan(receive: Receive, send_: Send) -> None:
    while True:
        message = await receive()
        await send_({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
