"""Authentication in front of every route: whatever is not named here needs an API key."""

import asyncio
import math

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.access.failed_keys import FailedKeys
from serving.http.access.keys import Caller, KeyRing
from serving.http.access.observe import HttpMetrics
from serving.http.errors import ApiError

METRICS_PATHS = ("/metrics", "/metrics/")
PROBE_PATHS = ("/health", "/live", "/ping", "/ready")


class Authenticate:
    """Put the caller into the request's state, or answer 401, 403 or 429.

    /health, /live, /ping and /ready are open to everybody, and so are the demo page and /docs
    (they hold no data) where the page is served; /metrics is open while there is no key at all.
    While many wrong keys come, their answers wait.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, metrics: HttpMetrics | None = None, demo: bool = False
    ):
        self.app = app
        self._keys, self._metrics, self._failed = keys, metrics, FailedKeys()
        self._open_paths = (*PROBE_PATHS, "/", "/docs") if demo else PROBE_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            state = scope.setdefault("state", {})
            state["caller"] = await self._identify(scope)
            self._admit(scope["path"], state["caller"])
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _admit(self, path: str, caller: Caller) -> None:
        """Raise ApiError unless the caller may ask for this path now."""
        metrics = path in METRICS_PATHS
        if path in self._open_paths:
            return
        if not (caller.reads_metrics if metrics else caller.uses_model):
            if caller is self._keys.anonymous:
                raise _unauthorized("An API key is needed: Authorization: Bearer KEY.")
            raise ApiError(403, "This key is not for this route.")
        if metrics:
            return
        wait_s = caller.bucket.wait_s() if caller.bucket else 0.0
        if caller.bucket and wait_s:
            raise limited(f"rate={caller.bucket.rate:g} requests a second", wait_s)

    async def _identify(self, scope: Scope) -> Caller:
        """Return the caller that the key belongs to, the anonymous one without a key.

        ApiError 401 for a wrong key; where nothing needs a key any one will do, because clients
        send a placeholder to a server without keys.
        """
        anonymous = self._keys.anonymous
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return anonymous
        caller, why = self._keys.check(key.strip())
        if caller is not None:
            return caller
        if anonymous.uses_model or scope["path"] in self._open_paths:
            return anonymous
        scope["state"]["failed_key"] = why
        if self._metrics is not None:
            self._metrics.failed_keys.labels(why).inc()
        delay_s = self._failed.delay_s()
        if delay_s:
            await asyncio.sleep(delay_s)
        raise _unauthorized("The API key is wrong.")


def limited(limit: str, wait_s: float) -> ApiError:
    """The answer to a request beyond a limit of its key."""
    seconds = str(max(1, math.ceil(wait_s)))
    text = f"The limit of this key is reached: {limit}. Try again after {seconds} s."
    return ApiError(429, text, headers={"Retry-After": seconds})


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})


def caller_of(request: Request) -> Caller:
    """Return the caller of this request."""
    return request.scope["state"]["caller"]


def require_admin(request: Request) -> None:
    """Refuse with 403 unless the caller may change what the server holds."""
    if not caller_of(request).is_admin:
        raise ApiError(403, "This route needs the admin key.")
